"""Verdicts of the regression gate: equal runs, and runs that are 5 % slower, where a change above 3 % fails.

    python benchmarks/bench_gate.py [DRAWS]       simulated step times with known noise (docs/comparing.md)
    python benchmarks/bench_gate.py --record ROUNDS   recordings made here, of steps of 20 and 21 equal pieces

Each recorded round has three runs a side in turn, and two more a side if the gate is undecided. Wrong verdicts are
equal runs that fail and slow runs that pass; on a busy machine more of them are undecided.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import etloom
from etloom.comparison.gate import judge_regression
from etloom.core.trace import Job
from support.step_noise import NOISES, record_runs

STEPS, WARMUP = 60, 3
PIECES = {"base": 20, "equal": 20, "slow": 21}
MAX_REGRESSION_PCT = 3.0


def judge(runs: list[Job], baselines: list[Job]) -> str:
    return str(judge_regression(runs, baselines, MAX_REGRESSION_PCT)["verdict"][0])


def simulate(draws: int) -> None:
    """Print the share of each verdict, in percent, per noise and number of runs a side."""
    print(
        f"{'noise':8}{'runs':>6}  {'equal: passed, failed, undecided':>34}  {'slow: passed, failed, undecided':>34}"
    )
    for name, noise in NOISES.items():
        for runs in (1, 3, 5):
            line = f"{name:8}{runs:6}"
            for slowdown in (1.0, 1.05):
                rng = np.random.default_rng(1)
                verdicts = Counter(
                    judge(
                        *(record_runs(rng, noise, runs, by, STEPS, has_device=True) for by in (slowdown, 1.0))
                    )
                    for _ in range(draws)
                )
                shares = (100 * verdicts[verdict] / draws for verdict in ("passed", "failed", "undecided"))
                line += "    " + "".join(f"{share:10.1f} " for share in shares)
            print(line, flush=True)


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
    verdicts = dict.fromkeys(("equal", "slow"), "undecided")
    for count in (3, 2):
        for _ in range(count):
            for side, pieces in PIECES.items():
                runs[side].append(record_in_process(folder / f"{side}{len(runs[side])}", pieces))
        verdicts |= {
            side: judge(runs[side], runs["base"]) for side in verdicts if verdicts[side] == "undecided"
        }
        if "undecided" not in verdicts.values():
            break
    return verdicts


def record(rounds: int) -> None:
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
    elif sys.argv[1:2] == ["--record"]:
        record(int(sys.argv[2]))
    else:
        simulate(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
