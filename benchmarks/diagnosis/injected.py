"""Injects problems into re-timed real traces and writes how often findings name them first.

    python benchmarks/diagnosis/injected.py                        # the seeds on which results are reported
    python benchmarks/diagnosis/injected.py --half even            # the seeds on which findings are improved
    python benchmarks/diagnosis/injected.py --kinds "slow rank" --strengths 5 10 --rows rows.jsonl

The traces are those of the folder in ETLOOM_DATA. The exit status is 1 if the accuracy, the false alarms or the cost
error of all kinds together are worse than the goals below.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from inject.bases import DATA
from inject.cases import Case, diagnose
from inject.kinds import KINDS
from inject.scores import FIRST, LEAST_STRENGTH, THIRD, compute_cost_error, count_right, write_scores

STRENGTHS = (3.0, 5.0, 10.0, 20.0)
CLEAN_BASES = ("ddp", "resnet", "cpu")
CLEAN_SEEDS = 8
LEAST_TOP_1, LEAST_TOP_3, MOST_COST_ERROR, MOST_ALARMS = 90.0, 97.0, 10.0, 5.0
"""Goals in percent."""


def list_cases(kinds: list[str], strengths: list[float], half: str, seeds: int) -> list[Case]:
    """Return the cases of every kind; the bases of a kind take turns."""
    offset = int(half == "odd")
    cases = []
    for i in range(seeds):
        for kind in kinds:
            bases = KINDS[kind].bases
            cases += [Case(kind, bases[i % len(bases)], strength, 2 * i + offset) for strength in strengths]
    clean = [Case("clean", base, 0.0, 2 * i + offset) for base in CLEAN_BASES for i in range(CLEAN_SEEDS)]
    return sorted([*cases, *clean], key=lambda case: (case.base, case.seed))


def diagnose_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [diagnose(case) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often findings name injected problems")
    parser.add_argument("--half", choices=("odd", "even"), default="odd", help="of the seeds")
    parser.add_argument("--seeds", type=int, default=3, help="of each kind and strength")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--strengths", nargs="*", type=float, default=STRENGTHS, help="in percent of a step")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="write each case as a line of JSON to this file")
    options = parser.parse_args()
    if not DATA.is_dir():
        raise SystemExit(f"{DATA}: no traces; set ETLOOM_DATA to their folder")
    cases = list_cases(options.kinds, options.strengths, options.half, options.seeds)
    groups = [list(group) for _, group in groupby(cases, key=lambda case: (case.base, case.seed))]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        rows = [row for group in pool.map(diagnose_all, groups) for row in group]
    if options.rows:
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = {kind: i for i, kind in enumerate(KINDS)}
    print(write_scores(sorted(rows, key=lambda row: order.get(row["kind"], -1))))
    strong = [row for row in rows if row["strength"] >= LEAST_STRENGTH]
    clean = [row for row in rows if row["kind"] == "clean"]
    good = (
        count_right(strong, FIRST) >= LEAST_TOP_1
        and count_right(strong, THIRD) >= LEAST_TOP_3
        and (compute_cost_error(strong) or 0.0) <= MOST_COST_ERROR
        and 100 * sum(bool(row["alarms"]) for row in clean) <= MOST_ALARMS * len(clean)
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
