"""Verbs over many ranks: CPU time and peak memory.

    python benchmarks/bench_ranks.py --ranks 16 64 --verbs info findings

Each verb runs as a process, without cache.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from subprocess import DEVNULL, run

from _measure import machine, table
from make import make_ranks

VERBS = {
    "info": ["info"],
    "findings": ["analyze", "findings"],
    "temporal-breakdown": ["analyze", "temporal-breakdown"],
    "report": ["report"],
}


def measure_process(command: list[str]) -> tuple[float, float, float]:
    """Return seconds, CPU seconds and peak bytes of a command, the only child of this process."""
    start = time.perf_counter()
    run(command, check=True, stdout=DEVNULL, stderr=DEVNULL)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * unit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64], help="default: 16 64")
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    arguments = parser.parse_args()
    machine()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in arguments.ranks:
            folder = make_ranks(ranks)
            for verb in arguments.verbs:
                command = [sys.executable, "-m", "etloom", *VERBS[verb], str(folder), "--no-cache"]
                if verb == "report":
                    command += ["--out", str(Path(scratch, "report.html"))]
                # In a fresh process, whose figures are of this one child.
                with get_context("spawn").Pool(1) as pool:
                    seconds, cpu, peak = pool.apply(measure_process, (command,))
                rows.append([f"{verb}, {ranks} ranks", f"{seconds:.1f}", f"{cpu:.1f}", f"{peak / 1e6:.0f}"])
    table("100,000 events per rank", ["", "seconds", "CPU s", "peak MB"], rows)


if __name__ == "__main__":
    main()
