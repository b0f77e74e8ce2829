"""Analyses of one rank, HTA's and etloom's in the same run; and each of etloom's on 10 million events.

    python benchmarks/bench_analyses.py            # --quick: without HTA's slowest (138 s) and the big trace
    python benchmarks/bench_analyses.py --big 20   # etloom's on 20 million rows of events; 0: none

An analysis that takes less than a second runs three times; the shortest time counts. "read" includes reading the
trace for this one analysis, without imports, also the shortest of three. A line below gives the time of a whole
process for one analysis, imports included. On the big trace each analysis runs once, in its own process, on a
linked trace; the peak is the memory above the trace.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from _measure import PEERS, Comparison, Task, machine, measure_copying, note_comparisons, run_once, table
from make import CACHE, find_device_trace, make_copies

import etloom
from etloom.core import registry
from etloom.core.errors import AnalysisError

QUESTIONS = {
    # ours, its options: HTA's call
    ("temporal-breakdown", ""): "get_temporal_breakdown(visualize=False)",
    ("comm-overlap", ""): "get_comm_comp_overlap(visualize=False)",
    ("kernel-breakdown", ""): "get_gpu_kernel_breakdown(visualize=False)",
    ("idle-time", ""): "get_idle_time_breakdown(ranks=[0], visualize=False)",
    ("launches", ""): "get_cuda_kernel_launch_stats(ranks=[0], visualize=False)",
    ("queue-length", ""): "get_queue_length_time_series(ranks=[0])",
    ("queue-summary", ""): "get_queue_length_summary(ranks=[0])",
    ("memory-bandwidth", ""): "get_memory_bw_time_series(ranks=[0])",
    ("memory-bandwidth-summary", ""): "get_memory_bw_summary(ranks=[0])",
    ("annotations", ""): "get_gpu_user_annotation_breakdown(visualize=False)",
    ("annotated-kernels", ""): "get_gpu_kernels_with_user_annotations(0)",
    ("operator-delays", ""): "get_aten_op_kernels_and_delay(ranks=[0])",
    (
        "kernel-sequences",
        "autograd::engine",
    ): "get_frequent_cuda_kernel_sequences('autograd::engine', {folder!r}, rank=0, visualize=False)",
}
READINGS = 3
PROCESS_ANALYSIS = "temporal-breakdown"
"""The analysis measured as a whole process."""
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
    shortest, rounds = float("inf"), 3
    while rounds:
        begin = time.perf_counter()
        try:
            answer = eval("hta." + call)
            shortest = min(shortest, time.perf_counter() - begin)
            rounds = rounds - 1 if shortest < 1 else 0
            if answer is None:
                shortest, rounds = "no answer", 0
        except Exception as error:
            shortest, rounds = f"{{type(error).__name__}}: {{error}}"[:60], 0
    print("\\0" + json.dumps([call, shortest]), flush=True)
"""


def run_hta(path: Path, calls: list[str]) -> dict[str, float | str]:
    """Return the seconds of each of HTA's calls, or its error."""
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


def time_analysis(job: etloom.Job, name: str, rounds: int = 3, **options: str) -> float | str:
    """Return the shortest time in s, or the reason for a failure."""
    least = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        try:
            etloom.analyze(job, name, **options)
        except AnalysisError as error:
            return str(error)[:60]
        least = min(least, time.perf_counter() - begin)
    return least


def time_with_reading(path: Path, name: str, **options: str) -> float:
    """Return the seconds to read a trace and run one analysis, the shortest of some."""
    least = float("inf")
    for _ in range(READINGS):
        begin = time.perf_counter()
        time_analysis(etloom.open(path, use_cache=False), name, 1, **options)
        least = min(least, time.perf_counter() - begin)
    return least


def print_process_times(path: Path, hta: dict[str, float | str], answer_time: float | str) -> None:
    """Print the time of one analysis from the start of Python's imports to the answer."""
    body = f"import etloom\netloom.analyze(etloom.open({str(path)!r}, use_cache=False), {PROCESS_ANALYSIS!r})"
    runs = [run_once(Task(PROCESS_ANALYSIS, "", body), timeout=300) for _ in range(READINGS)]
    mine: float | str = min((run[0] for run in runs if not isinstance(run, str)), default="failed")
    parts = [hta.get("import"), hta.get("first read"), answer_time]
    hta_time = sum(parts) if all(isinstance(part, float) for part in parts) else "not run"
    print(
        f"\n{PROCESS_ANALYSIS} as a process, with imports: etloom {_format(mine)} s, HTA {_format(hta_time)} s"
    )


def compare_with_hta(path: Path, quick: bool, folder: Path) -> None:
    job = etloom.open(path, use_cache=False)
    questions = {
        key: value for key, value in QUESTIONS.items() if not (quick and key[0] == "kernel-sequences")
    }
    calls = {key: call.format(folder=str(folder)) for key, call in questions.items()}
    hta = run_hta(path, list(calls.values()))
    copied = job[job.ranks[0]].events.estimated_size() / measure_copying()
    rows = []
    for name, operator in questions:
        options = {"operator": operator} if operator else {}
        mine, whole = time_analysis(job, name, **options), time_with_reading(path, name, **options)
        other, read = hta.get(calls[name, operator], "not run"), hta.get("read", "")
        hta_whole = read + other if isinstance(read, float) and isinstance(other, float) else ""
        ratios = [
            f"{b / a:,.0f}x" if isinstance(a, float) and isinstance(b, float) else ""
            for a, b in ((mine, other), (whole, hta_whole))
        ]
        if isinstance(mine, float) and isinstance(other, float):
            note_comparisons(
                Comparison(
                    f"{name}: times as fast as HTA",
                    other / mine,
                    "x",
                    baseline="HTA, with reading",
                    ratio=hta_whole / whole if isinstance(hta_whole, float) else None,
                    limit="copy of the events",
                    distance=mine / copied,
                )
            )
        rows.append(
            [
                name,
                _format(mine),
                _format(other),
                ratios[0],
                _format(whole),
                _format(hta_whole),
                ratios[1],
            ]
        )
    header = ("", "etloom", "HTA", "ratio", "etloom, read", "HTA, read", "ratio")
    table(f"{path.name}: seconds", header, rows)
    print_process_times(path, hta, hta.get(calls[PROCESS_ANALYSIS, ""], "not run"))


def run_on_big_trace(millions: float) -> None:
    """Run every analysis on a trace of this many million rows of events."""
    copies = max(1, round(millions * 1e6 / 26_932))
    linked = CACHE / f"linked_x{copies}.parquet"
    if not linked.exists():
        source = make_copies("kineto", copies)
        etloom.export(etloom.open(source, use_cache=False)[0], linked)
        source.unlink()  # ten times as large
    rows = []
    setup = "import etloom\nfrom etloom.core import registry\nfrom etloom.core.errors import AnalysisError\n"
    setup += f"trace = etloom.read({str(linked)!r})\nreason = ''\n"
    events = etloom.read(linked).events.height
    for name in registry.list_plugins("analyses"):
        body = f"try: etloom.analyze(trace, {name!r})\nexcept AnalysisError as error: reason = str(error)"
        run = run_once(Task(name, setup + f"registry.get('analyses', {name!r})", body, "reason"), timeout=300)
        if isinstance(run, str):
            rows.append([name, "failed", "", "", run[:60]])
        else:
            seconds, cpu, peak, reason = run
            rows.append([name, f"{seconds:.2f}", f"{cpu:.2f}", f"{peak / 1e6:,.0f}", str(reason)[:60]])
    table(f"{events:,} rows of events: seconds", ("", "etloom", "CPU s", "peak MB", ""), rows)


def _format(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="skip everything that takes minutes")
    parser.add_argument(
        "--big",
        type=float,
        default=10,
        metavar="MILLIONS",
        help="rows of events of the big trace (default: 10)",
    )
    options = parser.parse_args()
    machine()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        compare_with_hta(find_device_trace(), options.quick, Path(folder))
    if options.big and not options.quick:
        run_on_big_trace(options.big)


if __name__ == "__main__":
    main()
