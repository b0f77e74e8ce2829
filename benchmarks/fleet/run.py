"""The store on generated runs of many ranks: time and memory of adding, times of questions, planted stragglers found.

    python benchmarks/fleet/run.py --ranks 100 1000

Each run has about 9,000 events per rank, one slow rank and one slow host. Adding and each question is a process of its
own; CPU seconds count all of its processes, peak memory is that of the largest one, and at adding also that of all
processes together.

Runs of different sizes are compared by the row "add, without the graph": store add leaves out the dependency graph of
larger runs, so that the row "add" of a small run includes more answers (gains of findings, critical path, slowdown);
of larger runs the two are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _measure import machine, table
from generate import RANKS_PER_HOST, generate, host_of, truth_file

from etloom.exports.store.summaries import MAX_GRAPH_EVENTS

SLOW_RANK, SLOW_HOST = 17, 3
EVENTS_PER_RANK = 9_000
WITHOUT_GRAPH = """
import sys
from etloom.analyses.findings import job_gain
from etloom.cli import main
from etloom.exports.store import summaries
job_gain.MAX_EVENTS = summaries.MAX_GRAPH_EVENTS = 0
sys.exit(main())
"""
"""etloom that treats every run as too large for the dependency graph. Its worker processes do not use that anyway."""
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
    "SQL, sum": ["query", "RUN", "select count(*) n, sum(dur) ns from events"],
    "report": ["report", "RUN", "--out", "PAGE"],
    "slowdown": ["analyze", "slowdown", "RUN"],
    "diff": ["diff", "RUN", "RUN"],
    "check": ["check", "RUN", "--baseline", "RUN"],
}


@dataclass(frozen=True)
class Measured:
    """A command: seconds, CPU seconds of all its processes, MB of the largest one and, on Linux, of all together at the
    same time, its stdout, and the last line of stderr if it failed."""

    seconds: float
    cpu: float
    peak_mb: float
    tree_mb: float | None
    output: str
    refusal: str | None


def measure(command: list[str], code: str | None = None) -> Measured:
    """Measure a command of etloom, or of a program with these arguments, as the only child of this process."""
    start = time.perf_counter()
    program = ["-m", "etloom"] if code is None else ["-c", code]
    process = subprocess.Popen(
        [sys.executable, *program, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    peaks: list[float] = []
    watcher = threading.Thread(target=watch_tree, args=(process, peaks), daemon=True)
    watcher.start()
    output, errors = process.communicate()
    seconds = time.perf_counter() - start
    watcher.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    refusal = (errors.strip().splitlines() or ["failed"])[-1] if process.returncode else None
    return Measured(
        seconds,
        used.ru_utime + used.ru_stime,
        used.ru_maxrss * unit / 1e6,
        max(peaks, default=None),
        output,
        refusal,
    )


def watch_tree(process: subprocess.Popen[str], peaks: list[float]) -> None:
    """Add the memory of a process and its children to ``peaks``, in MB, every half a second until it ends.

    Memory that processes share counts once (PSS); nothing is added where the system does not report it.
    """
    while process.poll() is None:
        total = 0
        for pid in list_tree(process.pid):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:  # it ended
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        if total:
            peaks.append(total * 1024 / 1e6)
        time.sleep(0.5)


def list_tree(pid: int) -> list[int]:
    """Return a process and all of its children, on Linux."""
    pids = [pid]
    for parent in pids:  # grows
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                pids += map(int, file.read_text().split())
            except OSError:  # it ended
                continue
    return pids


def measure_alone(command: list[str], code: str | None = None) -> Measured:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (command, code))


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
            measure_alone(["store", "stragglers", str(store), "--by", by, "--format", "json"]).output
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
    adding = ["store", "add", str(run), "--jobs", str(jobs), "--to"]
    rows = []
    if ranks * EVENTS_PER_RANK <= MAX_GRAPH_EVENTS:
        without_graph = measure_alone([*adding, str(scratch / "without-graph")], WITHOUT_GRAPH)
        shutil.rmtree(scratch / "without-graph", ignore_errors=True)
        rows.append(format_row("add, without the graph", without_graph, ranks))
    rows.append(format_row("add", measure_alone([*adding, str(store)]), ranks))
    places = {
        "RUN": str(store / f"run={run.name}"),
        "STORE": str(store),
        "PAGE": str(scratch / "report.html"),
    }
    refusals = []
    for name, words in QUESTIONS.items():
        measured = measure_alone([places.get(word, word) for word in words])
        rows.append(format_row(name, measured, ranks))
        if measured.refusal is not None:
            refusals.append(f"{name}: {measured.refusal}")
    headings = ["", "seconds", "CPU s", "CPU ms per rank", "peak MB", "all processes MB"]
    table(f"{ranks:,} ranks", headings, rows)
    print(*refusals, sep="\n")
    print(check_truth(store, run))


def format_row(name: str, measured: Measured, ranks: int) -> list[str]:
    return [
        name,
        f"{measured.seconds:.2f}",
        f"{measured.cpu:.2f}",
        f"{1e3 * measured.cpu / ranks:.0f}",
        f"{measured.peak_mb:.0f}",
        "" if measured.tree_mb is None else f"{measured.tree_mb:.0f}",
    ]


if __name__ == "__main__":
    main()
