"""Analyses of one rank, HTA's beside ours in the same run; and each of ours on a big trace.

    python benchmarks/bench_analyses.py            # without HTA's slowest (138 s of sequences): --quick
    python benchmarks/bench_analyses.py --big 1200 # and ours on a file of 1,200 MB, some 5 million events

Reading is not counted. Each question is asked three times of ours and once of HTA, the least time stands.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from _measure import PEERS, ROOT, machine, table
from make import make

import etloom
from etloom import registry
from etloom.errors import AnalysisError

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
HTA = """
import json, logging, sys, time
logging.disable(logging.WARNING)
import plotly.io
plotly.io.renderers.default = "json"
plotly.io.show = lambda *a, **k: None
import plotly.graph_objects as go
go.Figure.show = lambda *a, **k: None
from hta.trace_analysis import TraceAnalysis
hta = TraceAnalysis(trace_files={{0: {path!r}}})
for call in json.load(sys.stdin):
    begin = time.perf_counter()
    try:
        exec("hta." + call)
        took = time.perf_counter() - begin
    except Exception as error:
        took = f"{{type(error).__name__}}: {{error}}"[:60]
    print("\\0" + json.dumps([call, took]), flush=True)
"""


def theirs(path: Path, calls: list[str]) -> dict[str, float | str]:
    """Seconds of each of HTA's calls, or what it failed with."""
    if not PEERS.exists():
        return {}
    done = subprocess.run(
        [str(PEERS), "-c", HTA.format(path=str(path))],
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


def beside(path: Path, quick: bool, folder: Path) -> None:
    job = etloom.open(path, use_cache=False)
    asked = {key: value for key, value in QUESTIONS.items() if not (quick and key[0] == "kernel-sequences")}
    calls = {key: call.format(folder=str(folder)) for key, (call, _) in asked.items()}
    found = theirs(path, list(calls.values()))
    rows = []
    for (name, operator), (_, wanted) in asked.items():
        mine = ours(job, name, **({"operator": operator} if operator else {}))
        other = found.get(calls[name, operator], "not run")
        ratio = f"{other / mine:,.0f}x" if isinstance(mine, float) and isinstance(other, float) else ""
        rows.append([name, _said(mine), _said(other), ratio, f"{wanted}x"])
    table(f"{path.name}: seconds", ("", "etloom", "HTA", "ratio", "asked"), rows)


def big(megabytes: float) -> None:
    path = make("kineto", megabytes)
    job = etloom.open(path, use_cache=False)
    events = sum(trace.events.height for trace in job.values())
    rows = [[name, _said(ours(job, name, rounds=1))] for name in registry.names("analyses")]
    table(f"{events:,} rows of events: seconds (asked: 5)", ("", "etloom"), rows)


def _said(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="leave out what takes HTA minutes")
    parser.add_argument(
        "--big", type=float, metavar="MB", help="also ask a file of so many MB of benchmarks/make.py"
    )
    options = parser.parse_args()
    machine()
    if (DATA / NEGATIVE_QUEUE).exists():
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            beside(DATA / NEGATIVE_QUEUE, options.quick, Path(folder))
    if options.big:
        big(options.big)


if __name__ == "__main__":
    main()
