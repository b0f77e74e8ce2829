"""Analyses of one rank, HTA's beside ours in the same run; and each of ours on 10 million events.

    python benchmarks/bench_analyses.py            # without HTA's slowest (138 s of sequences) and the big one: --quick
    python benchmarks/bench_analyses.py --big 20   # ours on 20 million rows of events; 0 leaves them out

A question that takes less than a second is asked three times of each, of the trace as it was read, and the least time
stands. "read" is a trace read for this one question: the least of three times for each of the two as well, and neither
pays for its imports there. A line below says what a process of its own takes for one question, imports and all. On the
big trace each analysis is asked once, in a process of its own, of a linked trace; the peak is what it took above the
trace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from _measure import PEERS, ROOT, Task, machine, run_once, table
from make import CACHE, make_copies

import etloom
from etloom.core import registry
from etloom.core.errors import AnalysisError

DATA = Path(os.environ.get("ETLOOM_DATA", ROOT.parent / "shared" / "data"))
NEGATIVE_QUEUE = "hta_misc/negative_queue_a100.json.gz"
QUESTIONS = {
    # ours, its options: HTA's call, the ratio asked for
    ("temporal-breakdown", ""): ("get_temporal_breakdown(visualize=False)", 10),
    ("comm-overlap", ""): ("get_comm_comp_overlap(visualize=False)", 10),
    ("kernel-breakdown", ""): ("get_gpu_kernel_breakdown(visualize=False)", 10),
    ("idle-time", ""): ("get_idle_time_breakdown(ranks=[0], visualize=False)", 10),
    ("launches", ""): ("get_cuda_kernel_launch_stats(ranks=[0], visualize=False)", 10),
    ("queue-length", ""): ("get_queue_length_time_series(ranks=[0])", 10),
    ("queue-summary", ""): ("get_queue_length_summary(ranks=[0])", 10),
    ("memory-bandwidth", ""): ("get_memory_bw_time_series(ranks=[0])", 10),
    ("memory-bandwidth-summary", ""): ("get_memory_bw_summary(ranks=[0])", 10),
    ("annotations", ""): ("get_gpu_user_annotation_breakdown(visualize=False)", 10),
    ("annotated-kernels", ""): ("get_gpu_kernels_with_user_annotations(0)", 10),
    ("operator-delays", ""): ("get_aten_op_kernels_and_delay(ranks=[0])", 50),
    ("kernel-sequences", "autograd::engine"): (
        "get_frequent_cuda_kernel_sequences('autograd::engine', {folder!r}, rank=0, visualize=False)",
        200,
    ),
}
READINGS = 3
ALONE = "temporal-breakdown"
"""What is asked in a process of its own."""
HTA = """
import time
begin = time.perf_counter()
import json, logging, sys
logging.disable(logging.WARNING)
import plotly.io
plotly.io.renderers.default = "json"
plotly.io.show = lambda *a, **k: None
import plotly.graph_objects as go
go.Figure.show = lambda *a, **k: None
from hta.trace_analysis import TraceAnalysis
print("\\0" + json.dumps(["import", time.perf_counter() - begin]), flush=True)
read = []
for _ in range({readings}):
    begin = time.perf_counter()
    hta = TraceAnalysis(trace_files={{0: {path!r}}})
    read.append(time.perf_counter() - begin)
print("\\0" + json.dumps(["first read", read[0]]), flush=True)
print("\\0" + json.dumps(["read", min(read)]), flush=True)
for call in json.load(sys.stdin):
    took, rounds = float("inf"), 3
    while rounds:
        begin = time.perf_counter()
        try:
            answer = eval("hta." + call)
            took = min(took, time.perf_counter() - begin)
            rounds = rounds - 1 if took < 1 else 0
            if answer is None:
                took, rounds = "no answer", 0
        except Exception as error:
            took, rounds = f"{{type(error).__name__}}: {{error}}"[:60], 0
    print("\\0" + json.dumps([call, took]), flush=True)
"""


def theirs(path: Path, calls: list[str]) -> dict[str, float | str]:
    """Seconds of each of HTA's calls, or what it failed with."""
    if not PEERS.exists():
        return {}
    done = subprocess.run(
        [str(PEERS), "-c", HTA.format(path=str(path), readings=READINGS)],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(f"HTA failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    return dict(json.loads(line.partition("\0")[2]) for line in done.stdout.splitlines() if "\0" in line)


def ours(job: etloom.Job, name: str, rounds: int = 3, **options: str) -> float | str:
    """The least of some times, s; why there is no answer."""
    least = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        try:
            etloom.analyze(job, name, **options)
        except AnalysisError as error:
            return str(error)[:60]
        least = min(least, time.perf_counter() - begin)
    return least


def with_reading(path: Path, name: str, **options: str) -> float:
    """Seconds to read a trace and ask it one question, the least of some."""
    least = float("inf")
    for _ in range(READINGS):
        begin = time.perf_counter()
        ours(etloom.open(path, use_cache=False), name, 1, **options)
        least = min(least, time.perf_counter() - begin)
    return least


def alone(path: Path, found: dict[str, float | str], answered: float | str) -> None:
    """Prints what one question takes from the start of Python's imports to the answer."""
    body = f"import etloom\netloom.analyze(etloom.open({str(path)!r}, use_cache=False), {ALONE!r})"
    runs = [run_once(Task(ALONE, "", body), timeout=300) for _ in range(READINGS)]
    mine: float | str = min((run[0] for run in runs if not isinstance(run, str)), default="failed")
    parts = [found.get("import"), found.get("first read"), answered]
    theirs = sum(parts) if all(isinstance(part, float) for part in parts) else "not run"
    print(f"\n{ALONE} in a process of its own, with imports: etloom {_said(mine)} s, HTA {_said(theirs)} s")


def beside(path: Path, quick: bool, folder: Path) -> None:
    job = etloom.open(path, use_cache=False)
    asked = {key: value for key, value in QUESTIONS.items() if not (quick and key[0] == "kernel-sequences")}
    calls = {key: call.format(folder=str(folder)) for key, (call, _) in asked.items()}
    found = theirs(path, list(calls.values()))
    rows = []
    for (name, operator), (_, wanted) in asked.items():
        options = {"operator": operator} if operator else {}
        mine, whole = ours(job, name, **options), with_reading(path, name, **options)
        other, read = found.get(calls[name, operator], "not run"), found.get("read", "")
        their_whole = read + other if isinstance(read, float) and isinstance(other, float) else ""
        ratios = [
            f"{b / a:,.0f}x" if isinstance(a, float) and isinstance(b, float) else ""
            for a, b in ((mine, other), (whole, their_whole))
        ]
        rows.append(
            [
                name,
                _said(mine),
                _said(other),
                ratios[0],
                f"{wanted}x",
                _said(whole),
                _said(their_whole),
                ratios[1],
            ]
        )
    header = ("", "etloom", "HTA", "ratio", "asked", "etloom, read", "HTA, read", "ratio")
    table(f"{path.name}: seconds", header, rows)
    alone(path, found, found.get(calls[ALONE, ""], "not run"))


def big(millions: float) -> None:
    """Asks every analysis of so many million rows of events."""
    copies = max(1, round(millions * 1e6 / 26_932))
    linked = CACHE / f"linked_x{copies}.parquet"
    if not linked.exists():
        source = make_copies("kineto", copies)
        etloom.export(etloom.open(source, use_cache=False)[0], linked)
        source.unlink()  # ten times as large
    rows = []
    setup = "import etloom\nfrom etloom import registry\nfrom etloom.core.errors import AnalysisError\n"
    setup += f"trace = etloom.read({str(linked)!r})\nsaid = ''\n"
    events = etloom.read(linked).events.height
    for name in registry.list_plugins("analyses"):
        body = f"try: etloom.analyze(trace, {name!r})\nexcept AnalysisError as error: said = str(error)"
        run = run_once(Task(name, setup + f"registry.get('analyses', {name!r})", body, "said"), timeout=300)
        if isinstance(run, str):
            rows.append([name, "failed", "", "", run[:60]])
        else:
            seconds, cpu, peak, said = run
            rows.append([name, f"{seconds:.2f}", f"{cpu:.2f}", f"{peak / 1e6:,.0f}", str(said)[:60]])
    table(f"{events:,} rows of events: seconds (asked: 5)", ("", "etloom", "CPU s", "peak MB", ""), rows)


def _said(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    parser.add_argument(
        "--big",
        type=float,
        default=10,
        metavar="MILLIONS",
        help="rows of events of the big trace (default: 10)",
    )
    options = parser.parse_args()
    machine()
    if (DATA / NEGATIVE_QUEUE).exists():
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            beside(DATA / NEGATIVE_QUEUE, options.quick, Path(folder))
    if options.big and not options.quick:
        big(options.big)


if __name__ == "__main__":
    main()
