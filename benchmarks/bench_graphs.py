"""The dependency graph: construction and schedule of a big one, HTA's critical path and etloom's, fit to recordings.

    python benchmarks/bench_graphs.py --sizes 1 10 --rounds 3

Sizes are in millions of points, with 1.5 edges per point. The recordings are those of ETLOOM_DATA, else that of
`etloom demo`.
"""

from __future__ import annotations

import time

import numpy as np
from _measure import (
    PEERS,
    Comparison,
    Figure,
    Task,
    arguments,
    compare,
    machine,
    measure,
    measure_touching,
    note_comparisons,
    peer_version,
    table,
)
from make import find_device_trace, format_name, list_recordings

import etloom
from etloom.graphs import algorithms, build_graph

RECORDINGS = (
    *("critical_path/alexnet.json.gz", "critical_path/simple_add.json.gz", "nccl_ddp/kineto_trace_0.json.gz"),
    *("dlrm/kineto_trace_0.json.gz", "dlrm", "hta_multirank", "tracelens/b200_eager.json.gz"),
    *("tracelens/h100_qwen.json.gz", "tracelens/mi300_qwen.json.gz"),
    *("tracelens/mi300_vllm_graph_execution.json.gz", "linear/kineto_trace_0.json.gz"),
    *("hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz", "cpu/pp_4"),
    "hta_misc/negative_queue_a100.json.gz",
)

# Eight chains, and half as many edges from a random point to a slightly later one of any chain.
DRAFT = """
import numpy as np
from etloom.graphs.algorithms import compute_times
from etloom.graphs.graph import Graph
n, lines = {points}, 8
k, random = n // lines, np.random.default_rng(1)
at = np.concatenate([np.cumsum(random.integers(0, 2000, k)) for _ in range(lines)])
n = len(at)
number = np.arange(n, dtype=np.int32).reshape(lines, k)
a = random.integers(0, n, n // 2).astype(np.int32)
b = (random.integers(0, lines, n // 2) * k + np.minimum(a % k + random.integers(5, 50, n // 2), k - 1)).astype(np.int32)
back = at[a] > at[b]
source = np.concatenate([number[:, :-1].ravel(), np.where(back, b, a)])
target = np.concatenate([number[:, 1:].ravel(), np.where(back, a, b)])
m = len(source)
draft = dict(
    time=at, event=number.ravel(), role=np.zeros(n, np.uint8), rank=np.zeros(n, np.int32), source=source,
    target=target, min_latency=random.integers(0, 2000, m), kind=np.zeros(m, np.uint8),
    owner=np.arange(m, dtype=np.int32),
)
del a, b, back, number
"""

HTA = """
import logging
logging.disable(logging.WARNING)
from hta.trace_analysis import TraceAnalysis
"""


def measure_speed(millions: float, rounds: int) -> None:
    points = int(millions * 1e6)
    task = Task(
        "Graph.from_edges and compute_times",
        DRAFT.format(points=points),
        "graph = Graph.from_edges(**draft); times = compute_times(graph)",
        "len(graph.source) if (times == graph.time).all() else None",
    )
    outcomes = measure([task], rounds)
    if isinstance(ours := outcomes[0], Figure):
        touched = ours.peak / measure_touching()
        note_comparisons(
            Comparison(
                f"graph and schedule of {millions:g} M points",
                ours.seconds,
                "s",
                limit="first touch of its memory",
                distance=ours.seconds / touched,
            )
        )
    compare(
        f"{millions:g} M points, median of {rounds}; without the input arrays",
        outcomes,
        millions,
        "M points",
        "edges",
    )


def compare_with_hta(rounds: int) -> None:
    path = find_device_trace()
    trace = path.name.removesuffix(".gz").removesuffix(".json")
    read = f"job = etloom.open({str(path)!r}, use_cache=False)"
    load = f"hta = TraceAnalysis(trace_files={{0: {str(path)!r}}})"
    ours = Task(
        "etloom critical-path",
        f"import etloom, etloom.analyses.critical_path\n{read}",
        "path = etloom.analyze(job, 'critical-path', by='edge')",
        "path.height",
    )
    theirs = Task(
        "HTA critical_path_analysis",
        f"{HTA}\n{load}",
        "path, _ = hta.critical_path_analysis(0, 'ProfilerStep', (0, 4))",
        "len(path.critical_path_nodes)",
        PEERS,
    )
    tasks = [ours, theirs] if peer_version("traceinsight") else [ours]
    outcomes = measure(tasks, rounds)
    mine, other = (*(one if isinstance(one, Figure) else None for one in outcomes), None)[:2]
    if mine is not None:
        note_comparisons(
            Comparison(
                f"critical path of {trace}, without reading",
                mine.seconds,
                "s",
                baseline="HTA",
                ratio=None if other is None else other.seconds / mine.seconds,
            )
        )
    compare(f"{trace}, without reading", outcomes, 1, "runs", "segments")


def measure_fits() -> None:
    rows = []
    for path in list_recordings(RECORDINGS):
        name = format_name(path)
        job = etloom.open(path, use_cache=False)
        start = time.perf_counter()
        graph = build_graph(job).graph
        seconds = time.perf_counter() - start
        quality = etloom.analyze(job, "graph-quality")
        total, first = quality.row(-1, named=True), quality.row(0, named=True)
        deviation = int(np.abs(algorithms.compute_times(graph) - graph.time).max())
        shares = [
            "" if first[share] is None else f"{first[share]:.2f}"
            for share in ("explained_pct", "chance_pct", "chance_back_pct", "ambiguous_pct")
        ]
        rows.append(
            [
                name,
                f"{total['points']:,}",
                f"{1000 * seconds:.0f}",
                deviation,
                f"{total['shortfall_pct']:.3f}",
                f"{total['max_shortfall_ns'] / 1000:.0f}",
                f"{total['residual_pct']:.2f}",
                *shares,
                "" if total["explainable"] else "not explainable",
            ]
        )
    header = ("", "points", "ms", "deviation ns", "shortfall %", "max shortfall us", "residual %")
    table(
        "How the graph fits recordings (several ranks: shares of the first)",
        (
            *header,
            "explained %",
            "chance %",
            "back %",
            "ambiguous %",
            "",
        ),
        rows,
    )


def main() -> None:
    options = arguments(__doc__ or "", sizes=(1, 10))
    machine()
    for millions in options.sizes:
        measure_speed(min(millions, 10), options.rounds)
    compare_with_hta(options.rounds)
    measure_fits()


if __name__ == "__main__":
    main()
