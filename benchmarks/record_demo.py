"""Record the run of `etloom demo` again: python benchmarks/record_demo.py

The files contain no host name and no path of the machine that recorded them, and are compressed with zstd. The
recording is kept only if its three largest findings are the three problems of examples/train_with_problems.py; on a
busy machine that may take a few attempts.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import zstandard

import etloom

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "etloom" / "cli" / "demo" / "recording"
SCRIPT = "examples/train_with_problems.py"
PROBLEMS = ["data-loading", "small-collectives", "stragglers"]
MAX_BYTES = 300_000
ATTEMPTS = 10
NAMES = {
    rf"\b{re.escape(socket.gethostname())}\b": "demo-host",
    rf'{re.escape(tempfile.gettempdir())}/[^/"]+/demo\b': "run",
    rf"{re.escape(str(ROOT))}/(?:\.venv/bin/)?": "",
    r"observer_(\d+)\.etob": r"torch_et_\1.json.gz",
    r'"platform": "[^"]*"': '"platform": "Linux"',
}
"""Texts that name this machine -> what replaces them."""


def record(folder: Path) -> None:
    launch = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", SCRIPT]
    command = [
        sys.executable,
        "-m",
        "etloom",
        "collect",
        "--out",
        folder,
        "--overwrite",
        "--steps",
        "5:8",
        "--",
        *launch,
    ]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for file in (*folder.glob("*.etob"), *folder.glob("*.yaml")):
        file.unlink()


def scrub(folder: Path, target: Path) -> None:
    """Copy the files of a run without names of this machine; traces are compressed with zstd."""
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
        for pattern, replacement in NAMES.items():
            text = re.sub(pattern, replacement, text)
        if file.suffix == ".gz":
            compressed = zstandard.ZstdCompressor(level=19).compress(text.encode())
            (target / file.with_suffix(".zst").name).write_bytes(compressed)
        else:
            (target / file.name).write_text(text.replace(".json.gz", ".json.zst"), encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(ATTEMPTS):
            folder, scrubbed = Path(scratch, "demo"), Path(scratch, "scrubbed")
            record(folder)
            shutil.rmtree(scrubbed, ignore_errors=True)
            scrubbed.mkdir()
            scrub(folder, scrubbed)
            largest = etloom.analyze(scrubbed, "findings")["pattern"][:3].to_list()
            size = sum(file.stat().st_size for file in scrubbed.iterdir())
            print(f"{size:,} bytes, largest findings: {', '.join(largest)}")
            if sorted(largest) == PROBLEMS and size <= MAX_BYTES:
                shutil.rmtree(TARGET, ignore_errors=True)
                shutil.copytree(scrubbed, TARGET)
                return
    sys.exit(f"none of {ATTEMPTS} recordings has these as its largest findings: {', '.join(PROBLEMS)}")


if __name__ == "__main__":
    main()
