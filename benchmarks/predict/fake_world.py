"""Records Llama 3 8B in a fake world, and compares its predicted step with published ones.

    python benchmarks/predict/fake_world.py     # needs torch; a minute

The script is lab/train_llama.py, with FSDP2 and selective recomputation. Measured by torchtitan, compiled:
benchmarks/llama3_h100_202412_torchtitan.md (8 H100 of 500 W, micro-batch 2, 77.0 GiB) and docs/performance.md of 2024
(64 A100, micro-batch 1).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from requirements import state

import etloom

SCRIPT = Path(__file__).parent / "lab" / "train_llama.py"
CASES = (("h100", "dgx-h100", 8, 2, 2.457), ("A100 80GB SXM", "dgx-a100", 64, 1, 2.755))
"""Device, network, GPUs, micro-batch, and measured seconds."""


def main() -> None:
    print(
        "device         gpus  micro-batch  predicted s  90 % interval  measured s   error  peak memory, GiB"
    )
    for device, network, gpus, batch, measured in CASES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "etloom", "collect", "--out", folder, "--fake-world", str(gpus)]
            command += ["--ranks", "0", "--", sys.executable, str(SCRIPT)]
            result = subprocess.run(
                command, env=os.environ | {"BATCH": str(batch)}, capture_output=True, text=True
            )
            if result.returncode:
                sys.exit(result.stderr[-1000:])
            row = etloom.predict(folder, device=device, network=network).table.row(0, named=True)
        step, lower, upper = (row[name] / 1e9 for name in ("step_ns", "lower_bound_ns", "upper_bound_ns"))
        memory = (row["peak_memory_bytes"] or 0) / 2**30
        print(
            f"{device:13}  {gpus:4}  {batch:11}  {step:11.2f}  {lower:5.2f} to {upper:.2f}  {measured:10.2f}  "
            f"{100 * (step / measured - 1):+5.1f} %  {memory:.1f}"
        )
        holds = lower <= measured <= upper and upper / lower <= 1.5
        text = f"{upper / lower:.2f}, contains {measured} s" if holds else f"{lower:.2f} to {upper:.2f} s"
        state(f"fake world, Llama 3 8B on {gpus} {device}, width of the interval", "1.5", text, holds)


if __name__ == "__main__":
    main()
