"""Injects bugs into a training run on two ranks and checks that findings name each as the first cause.

    python benchmarks/diagnosis/run.py                # all of bugs.py, ten to sixty seconds each
    python benchmarks/diagnosis/run.py clean copies   # only these
    python benchmarks/diagnosis/run.py --keep traces  # keep the recorded runs in this folder

A bug that makes steps at least 5 % longer than in the clean run must be the first finding; in the clean run no finding
may promise the job 5 %. The exit status is 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
from bugs import BUGS, Bug

import etloom

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _measure import print_markdown

FOLDER = Path(__file__).resolve().parent
LEAST_PCT = 5.0
CLEAN_RUNS = 3
"""On a busy machine the clean run is not clean: up to so many are recorded, until one is."""


def record(name: str, bug: Bug, folder: Path) -> Path:
    """Record steps 3 to 7 of a run with this bug; return its folder."""
    out = folder / re.sub(r"\W+", "_", name).strip("_")
    collect = [sys.executable, "-m", "etloom", "collect", "--out", str(out), "--overwrite", "--steps", "3:8"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(FOLDER / "train.py"), "--bug", name]
    command = [*collect, *bug.collect, "--", *torchrun, *script]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    if result.returncode:
        raise SystemExit(f"{name}: {result.stderr[-2000:]}")
    return out


def measure_step_ms(job: etloom.Job) -> float:
    """Return the median step time, each the mean over the ranks, in ms."""
    steps = etloom.analyze(job, "steps").group_by("step").agg(pl.col("dur_ns").mean())
    return float(steps.select(pl.col("dur_ns").median()).item()) / 1e6


def diagnose(name: str, bug: Bug, run: Path, clean_ms: float | None) -> tuple[dict[str, str], float, bool]:
    """Return the row of the table, the step time in ms, and whether the diagnosis is right."""
    job = etloom.open(run)
    step_ms = measure_step_ms(job)
    findings = etloom.analyze(job, "findings").with_columns(pl.col("job_gain_pct").fill_null(0))
    named = findings.filter(pl.col("job_gain_pct") >= LEAST_PCT)
    cost_pct = 100 * (1 - clean_ms / step_ms) if clean_ms else 0.0
    first: dict[str, Any] = {"pattern": "-", "job_gain_pct": 0.0}
    if findings.height:
        first = findings.row(0, named=True)
    if not bug.pattern:
        is_right = named.is_empty()
    else:
        is_right = cost_pct < LEAST_PCT or first["pattern"] == bug.pattern
    own = findings.filter(pattern=bug.pattern)["job_gain_pct"]
    row = {
        "bug": name,
        "step": f"{step_ms:.0f} ms",
        "costs": f"{cost_pct:.0f} %",
        "first finding": first["pattern"],
        "gain": f"{first['job_gain_pct']:.0f} %",
        "gain of the right one": f"{own[0]:.0f} %" if len(own) else "-",
        "others of 5 % or more": ", ".join(named.filter(pl.col("pattern") != bug.pattern)["pattern"]) or "-",
        "right": "yes" if is_right else "NO",
    }
    return row, step_ms, is_right


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the findings on injected bugs")
    parser.add_argument("bugs", nargs="*", help=f"of {', '.join(BUGS)}; default: all")
    parser.add_argument(
        "--keep", type=Path, help="keep the recorded runs in this folder, and reuse those in it"
    )
    options = parser.parse_args()
    if unknown := set(options.bugs) - set(BUGS):
        parser.error(f"unknown bug {min(unknown)!r}; expected one of {', '.join(BUGS)}")
    rows, verdicts, clean_ms = [], [], None
    with tempfile.TemporaryDirectory() as scratch:
        for name in dict.fromkeys(["clean", *(options.bugs or BUGS)]):
            folder = options.keep or Path(scratch)
            run = folder / re.sub(r"\W+", "_", name).strip("_")
            for _ in range(1 if BUGS[name].pattern else CLEAN_RUNS):
                if not (run.exists() and options.keep):
                    record(name, BUGS[name], folder)
                row, step_ms, is_right = diagnose(name, BUGS[name], run, clean_ms)
                if is_right or options.keep:
                    break
            clean_ms = clean_ms or step_ms
            rows.append(row)
            verdicts.append(is_right)
            print(f"{name}: {row['first finding']} {row['gain']}", file=sys.stderr)
    print_markdown(rows)
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
