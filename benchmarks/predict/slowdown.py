"""Slowdown by stragglers: etloom's values next to those published for two production traces.

    python benchmarks/predict/slowdown.py

The traces and results are those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et
al., OSDI 2025), in the folder straggler_what_if of ETLOOM_DATA. No value is tuned.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from requirements import DATA, state

import etloom

PUBLISHED = DATA / "straggler_what_if"
ITEMS = {"type": "optype", "stage": "stage", "data rank": "dp_rank"}
MAX_ERROR = 0.01


def read_published(name: str) -> Iterator[tuple[str, str, float]]:
    """Yield kind, item and published slowdown of a trace; of workers that of the worst, times."""
    result = json.loads((PUBLISHED / f"result-{name}.json").read_text())
    yield "job", "all", result["blocking_slowdown"]
    for kind, key in ITEMS.items():
        for item, slowdown in result[f"blocking_decompose_by_{key}"].items():
            yield kind, item, slowdown
    for step, slowdown in result["blocking_step_slowdown"].items():
        yield "step", step, slowdown


def compare(name: str) -> float:
    """Print a table of a trace and return its largest relative error."""
    begin = time.perf_counter()
    job = etloom.open(PUBLISHED / f"trace-{name}.parquet", use_cache=False)
    opened = time.perf_counter()
    table = etloom.analyze(job, "slowdown")
    ended = time.perf_counter()
    ours = {(row["by"], row["item"]): row for row in table.iter_rows(named=True)}
    published = list(read_published(name))
    print(f"\n{name}: {len(job)} ranks, {sum(1 for kind, *_ in published if kind == 'step')} steps; ", end="")
    print(f"read in {opened - begin:.1f} s, answered in {ended - opened:.1f} s")
    print(f"{'':10} {'item':28} {'published':>10} {'etloom':>10} {'error':>10}")
    errors = {}
    for kind, item, slowdown in published:
        value = ours[kind, item]["slowdown"]
        errors[kind, item] = abs(value / slowdown - 1)
        if kind != "step":
            print(f"{kind:10} {item:28} {slowdown:10.6f} {value:10.6f} {errors[kind, item]:10.1e}")
    steps = max(error for (kind, _), error in errors.items() if kind == "step")
    print(f"{'step':10} {'worst of all steps':28} {'':10} {'':10} {steps:10.1e}")
    (worker,) = (row for key, row in ours.items() if key[0] == "slowest workers")
    worst = json.loads((PUBLISHED / f"mw-{name}.json").read_text())
    stage = json.loads((PUBLISHED / f"ms-{name}.json").read_text())
    last = max(int(item) for kind, item in ours if kind == "stage")
    pairs = (
        ("worker", f"{worker['item']}, its slowdown", worst["tadd"] / worst["tideal"], worker["slowdown"]),
        ("worker", f"{worker['item']}, explained", worst["Mw"], worker["explained_pct"] / 100),
        ("stage", f"{last}, explained", stage["Ms"], ours["stage", str(last)]["explained_pct"] / 100),
    )
    for kind, item, expected, value in pairs:
        errors[kind, item] = abs(value / expected - 1)
        print(f"{kind:10} {item:28} {expected:10.6f} {value:10.6f} {errors[kind, item]:10.1e}")
    return max(errors.values())


def main() -> int:
    """Compare both traces; exit status 1 if a value is more than 1 % off."""
    if not DATA.is_dir():
        print(f"no folder {PUBLISHED}; set ETLOOM_DATA")
        return 1
    worst = max(compare(name) for name in ("AR", "ST"))
    print(f"\nlargest relative error of all values: {worst:.1e} (asked: {MAX_ERROR:.0e})")
    state("slowdown, worst relative error of two traces", "1 %", f"{100 * worst:.1g} %", worst <= MAX_ERROR)
    return int(worst > MAX_ERROR)


if __name__ == "__main__":
    sys.exit(main())
