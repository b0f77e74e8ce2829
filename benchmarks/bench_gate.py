"""Verdicts of the regression gate on recordings made here: equal runs, and runs with 5 % more work in each step.

    python benchmarks/bench_gate.py [ROUNDS]

Each round records three runs a side in turn, and two more a side where the gate asks for more. A step of 21 equal
pieces takes 5 % longer than one of 20, but for the little that is not in the pieces. Wrong verdicts are equal runs that
fail and slow runs that pass; on a busy machine more of them are undecided.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import etloom
from etloom.comparison.gate import judge_regression
from etloom.core.trace import Job

STEPS, WARMUP = 60, 3
PIECES = {"base": 20, "equal": 20, "slow": 21}
MAX_REGRESSION_PCT = 3.0


def record_run(out: Path, pieces: int) -> None:
    """Record steps of so many pieces in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = torch.randn(96, 96, requires_grad=True)
    x = torch.randn(96, 96)
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    with etloom.record(out, steps=f"{WARMUP}:{WARMUP + STEPS}", shapes=False) as recording:
        for _ in range(WARMUP + STEPS + 1):
            for _ in range(pieces):
                (x @ weight).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.step()


def record_in_process(out: Path, pieces: int) -> Job:
    subprocess.run(
        [sys.executable, __file__, "--one", str(out), str(pieces)], check=True, stderr=subprocess.DEVNULL
    )
    return etloom.open(out)


def judge_round(folder: Path) -> dict[str, str]:
    """Return the verdicts on the equal and on the slow runs against the base."""
    runs: dict[str, list[Job]] = {side: [] for side in PIECES}
    verdicts: dict[str, str] = {}
    for count in (3, 2):
        for _ in range(count):
            for side, pieces in PIECES.items():
                runs[side].append(record_in_process(folder / f"{side}{len(runs[side])}", pieces))
        for side in ("equal", "slow"):
            if verdicts.get(side, "undecided") == "undecided":
                table = judge_regression(runs[side], runs["base"], MAX_REGRESSION_PCT)
                verdicts[side] = str(table["verdict"][0])
        if "undecided" not in verdicts.values():
            break
    return verdicts


def main(rounds: int) -> None:
    counts: dict[str, Counter[str]] = {"equal": Counter(), "slow": Counter()}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as scratch:
            for side, verdict in judge_round(Path(scratch)).items():
                counts[side][verdict] += 1
    print(f"gate: {rounds} rounds, a change above {MAX_REGRESSION_PCT:g} % fails")
    print(f"{'':8}{'passed':>10}{'failed':>10}{'undecided':>12}")
    for side, of_side in counts.items():
        print(f"{side:8}{of_side['passed']:10}{of_side['failed']:10}{of_side['undecided']:12}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        record_run(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
