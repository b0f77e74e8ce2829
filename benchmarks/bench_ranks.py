"""Verbs over many ranks: CPU time and peak memory.

    python benchmarks/bench_ranks.py --ranks 16 64 --verbs info findings

Each verb runs as a process, without cache. Then runs of small ranks: with an empty cache, and again.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from subprocess import DEVNULL, run

from _measure import IMPORTS, Comparison, machine, note_comparisons, table, touch_memory
from make import make_ranks, make_small_ranks

VERBS = {
    "info": ["info"],
    "findings": ["analyze", "findings"],
    "temporal-breakdown": ["analyze", "temporal-breakdown"],
    "report": ["report"],
}


SMALL_RUNS = (("info", 2), ("report", 8), ("info", 256), ("report", 256))
"""Verb and ranks."""


def measure_process(command: list[str], **environment: str) -> tuple[float, float, float]:
    """Return seconds, CPU seconds and peak bytes of a command, the only child of this process."""
    start = time.perf_counter()
    run(command, check=True, stdout=DEVNULL, stderr=DEVNULL, env={**os.environ, **environment})
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * unit


def measure_apart(command: list[str], **environment: str) -> tuple[float, float, float]:
    """Return the figures of `measure_process` from a fresh process, whose figures are of this one child."""
    touch_memory()
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure_process, (command,), environment)


def measure_small_runs(rounds: int) -> None:
    """Measure verbs on small ranks, with an empty cache and again, next to what any such process does."""
    limits = {
        name: statistics.median(measure_apart([sys.executable, "-c", code])[0] for _ in range(rounds))
        for name, code in (("imports of polars and numpy", IMPORTS), ("start of Python", "pass"))
    }
    rows = [[f"limit: {name}", f"{seconds:.3f}", "", ""] for name, seconds in limits.items()]
    for verb, ranks in SMALL_RUNS:
        command = [sys.executable, "-m", "etloom", verb, str(make_small_ranks(ranks))]
        figures: tuple[list[tuple[float, float, float]], ...] = ([], [])
        for _ in range(rounds if ranks < 100 else min(rounds, 3)):
            with tempfile.TemporaryDirectory() as scratch:
                words = [*command, "--out", f"{scratch}/report.html"] if verb == "report" else command
                time.sleep(2.1)  # only what did not change for two seconds is kept
                for runs in figures:
                    runs.append(measure_apart(words, ETLOOM_CACHE=f"{scratch}/cache"))
        medians = [[statistics.median(values) for values in zip(*runs, strict=True)] for runs in figures]
        for when, (seconds, cpu, peak), (limit, least) in zip(
            ("empty cache", "again"), medians, limits.items(), strict=True
        ):
            name = f"{verb}, {ranks} ranks, {when}"
            rows.append([name, f"{seconds:.3f}", f"{cpu:.3f}", f"{peak / 1e6:.0f}"])
            first = medians[0][0] / seconds if when == "again" else None
            note_comparisons(
                Comparison(
                    f"{name}, a process",
                    seconds,
                    "s",
                    baseline="with an empty cache" if first else "",
                    ratio=first,
                    limit=limit,
                    distance=seconds / least,
                )
            )
    table("small ranks", ["", "seconds", "CPU s", "peak MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64], help="default: 16 64")
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each small one (default: 3)")
    arguments = parser.parse_args()
    machine()
    measure_small_runs(arguments.rounds)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in arguments.ranks:
            folder = make_ranks(ranks)
            for verb in arguments.verbs:
                command = [sys.executable, "-m", "etloom", *VERBS[verb], str(folder), "--no-cache"]
                if verb == "report":
                    command += ["--out", str(Path(scratch, "report.html"))]
                seconds, cpu, peak = measure_apart(command)
                rows.append([f"{verb}, {ranks} ranks", f"{seconds:.1f}", f"{cpu:.1f}", f"{peak / 1e6:.0f}"])
    if rows:
        table("100,000 events per rank", ["", "seconds", "CPU s", "peak MB"], rows)


if __name__ == "__main__":
    main()
