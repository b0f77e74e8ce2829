"""The store on generated runs of many ranks: time and memory of adding, times of questions, planted stragglers found.

    python benchmarks/fleet/run.py --ranks 100 1000

Each run has about 9,000 events per rank, one slow rank and one slow host. Adding and each question is a process of its
own; CPU seconds count all of its processes, peak memory is that of the largest one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _measure import machine, table
from generate import RANKS_PER_HOST, generate, host_of, truth_file

SLOW_RANK, SLOW_HOST = 17, 3
QUESTIONS = {
    "info": ["info", "RUN"],
    "stragglers": ["analyze", "stragglers", "RUN"],
    "imbalance": ["analyze", "imbalance", "RUN"],
    "collectives": ["analyze", "collectives", "RUN"],
    "arrivals": ["analyze", "arrivals", "RUN"],
    "findings": ["analyze", "findings", "RUN"],
    "slow hosts": ["store", "stragglers", "STORE"],
    "slow ranks": ["store", "stragglers", "STORE", "--by", "rank"],
    "SQL, all events": ["query", "RUN", "select cat, count(*) n from events group by cat"],
}


def measure(command: list[str]) -> tuple[float, float, float, str]:
    """Return seconds, CPU seconds, peak MB and stdout of a command, the only child of this process."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "etloom", *command], check=True, stdout=subprocess.PIPE, text=True
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = used.ru_utime + used.ru_stime
    return time.perf_counter() - start, cpu, used.ru_maxrss * unit / 1e6, done.stdout


def measure_alone(command: list[str]) -> tuple[float, float, float, str]:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (command,))


def check_truth(store: Path, run: Path) -> str:
    """Compare the slow hosts and ranks that are found with the planted ones."""
    truth = json.loads(truth_file(run).read_text())
    planted = {
        "host": {host_of(rank) for rank in truth["slow_ranks"]} | set(truth["slow_hosts"]),
        "rank": set(truth["slow_ranks"]),
    }
    verdicts = []
    for by, expected in planted.items():
        rows = json.loads(
            measure_alone(["store", "stragglers", str(store), "--by", by, "--format", "json"])[3]
        )
        reported = {row[by] for row in rows if row["slow_runs"]}
        verdicts.append(
            f"slow {by}s: {'as planted' if reported == expected else f'{reported}, planted {expected}'}"
        )
    return "; ".join(verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[100, 1000], help="default: 100 1000")
    parser.add_argument("--folder", type=Path, help="keep the runs there; default: a temporary folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for ranks in arguments.ranks:
            if ranks <= (SLOW_HOST + 1) * RANKS_PER_HOST:
                parser.error(f"{ranks} ranks have no host {SLOW_HOST}")
            bench(folder, Path(scratch), ranks, arguments.jobs)


def bench(folder: Path, scratch: Path, ranks: int, jobs: int) -> None:
    run, store = folder / f"ranks-{ranks}", scratch / f"store-{ranks}"
    if not run.exists():
        generate(run, ranks, [SLOW_RANK], [SLOW_HOST], jobs=jobs)
    adding = ["store", "add", str(run), "--to", str(store), "--jobs", str(jobs)]
    seconds, cpu, peak, _ = measure_alone(adding)
    rows = [["add", f"{seconds:.1f}", f"{cpu:.1f}", f"{1e3 * cpu / ranks:.0f}", f"{peak:.0f}"]]
    places = {"RUN": str(store / f"run={run.name}"), "STORE": str(store)}
    for name, words in QUESTIONS.items():
        seconds, cpu, peak, _ = measure_alone([places.get(word, word) for word in words])
        rows.append([name, f"{seconds:.2f}", f"{cpu:.2f}", f"{1e3 * cpu / ranks:.0f}", f"{peak:.0f}"])
    table(f"{ranks:,} ranks", ["", "seconds", "CPU s", "CPU ms per rank", "peak MB"], rows)
    print(check_truth(store, run))


if __name__ == "__main__":
    main()
