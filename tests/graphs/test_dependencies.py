"""The graph of recorded traces: what must hold of every one, and the figures measured on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom import _native
from etloom.analyses import critical_path, slack
from etloom.core import registry
from etloom.core.errors import AnalysisError, InvalidValue, LinkError, UnknownName
from etloom.core.trace import Job, Trace
from etloom.graphs import MinimumLatencies, algorithms, build_graph, critical_paths, quality
from etloom.graphs.graph import EdgeKind, Graph, PointRole
from support import small_traces
from support.examples import examples

# Per trace, in percent: the largest shortfall of the makespan with minimum latencies alone, and the smallest share of
# explained kernel starts. None: there is no GPU activity, or too little.
FIGURES: dict[str, tuple[float, float | None]] = {
    "critical_path/alexnet.json.gz": (0.001, 97.9),
    "critical_path/simple_add.json.gz": (0.001, 95.9),
    "critical_path/event_sync.json.gz": (0.094, 100),
    "critical_path/event_sync_multi_stream.json.gz": (0.02, 83.3),
    "nccl_ddp/kineto_trace_0.json.gz": (0.31, 99.7),
    "dlrm/kineto_trace_0.json.gz": (1.69, 99.2),
    "dlrm": (0.9, 98.7),
    "tracelens/b200_eager.json.gz": (0.001, 98.2),
    "tracelens/h100_qwen.json.gz": (1.82, 99.9),
    "tracelens/mi300_qwen.json.gz": (0.06, 96.3),
    "tracelens/mi300_vllm_graph_execution.json.gz": (0.08, 99.3),
    "linear/kineto_trace_0.json.gz": (0.98, 100),
    "resnet_mismatch/kineto_trace_0.json.gz": (0.1, 99.9),
    "hta_misc/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz": (0.32, 99.8),
    "cpu/pp_4": (5.9, None),
    "cpu/ddp_2": (0.1, None),
    "cpu/coll_4": (13, None),
    "hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz": (1.9, None),
    "hta_multirank": (2.1, None),
}
DOUBTFUL = {
    "hta_multirank": "rank 0: 63 % of the kernel starts are unexplained",
    "hta_misc/mi250_minitoy_train_ROCm6_2_kineto.json.gz": "rank 0: only 16 kernel starts",
    "critical_path/event_sync.json.gz": "rank 0: only 5 kernel starts",
    "critical_path/event_sync_multi_stream.json.gz": "rank 0: only 6 kernel starts",
}


def opened(data: Path, name: str) -> Job:
    return etloom.open(data / name, use_cache=False)


def pieces_tile(graph: Graph) -> bool:
    """Whether the pieces of threads form chains, each without a gap."""
    own = np.isin(graph.kind, (EdgeKind.SEGMENT, EdgeKind.IDLE, EdgeKind.WAIT))
    source, target = graph.source[own], graph.target[own]
    return len(np.unique(source)) == len(source) and len(np.unique(target)) == len(target)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_invariants_of_every_recording(name: str, data: Path) -> None:
    job = opened(data, name)
    graph = build_graph(job).graph
    assert (algorithms.compute_times(graph) == graph.time).all()
    assert (graph.residual >= 0).all()
    took = np.repeat(graph.time, np.diff(graph.first)) - graph.time[graph.source]
    assert ((graph.min_latency >= 0) & (graph.lag <= took)).all()
    assert graph.dropped.sum() == 0
    assert pieces_tile(graph)
    halved = algorithms.compute_times(
        graph, np.where(graph.kind == EdgeKind.KERNEL, graph.lag // 2, graph.lag)
    )
    assert (halved <= graph.time).all()

    most, least = FIGURES[name]
    table = etloom.analyze(job, "graph-quality")
    whole = table.row(-1, named=True)
    assert 0 <= -whole["shortfall_pct"] <= most
    assert whole["reason"] == DOUBTFUL.get(name)
    assert whole["explainable"] == (name not in DOUBTFUL)
    for row in table.filter(pl.col("rank").is_not_null()).iter_rows(named=True):
        if least is not None:
            assert row["explained_pct"] >= least
            assert row["device_starts"] < 20 or row["chance_pct"] < 10


def path_of(job: Job, **options: Any) -> dict[str, float]:
    table = etloom.analyze(job, "critical-path", **options)
    return {row["kind"]: row["pct"] for row in table.iter_rows(named=True)}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("tracelens/h100_qwen.json.gz", {"kernel": 88.4, "segment": 6.6, "stream": 4.8}),
        ("tracelens/mi300_qwen.json.gz", {"kernel": 86.9, "segment": 12.8}),
        ("nccl_ddp/kineto_trace_0.json.gz", {"segment": 93.9, "idle": 5.8}),
        ("linear/kineto_trace_0.json.gz", {"segment": 92.5, "idle": 6.5, "handoff": 1.0}),
        ("dlrm", {"segment": 60.9, "later start": 34.3, "transfer": 2.6}),
        ("tracelens/b200_eager.json.gz", {"segment": 100.0}),
    ],
)
@pytest.mark.slow
def test_critical_paths_of_recordings(name: str, kinds: dict[str, float], data: Path) -> None:
    found = path_of(opened(data, name))
    assert sum(found.values()) == pytest.approx(100)
    assert {kind: round(found[kind], 1) for kind in kinds} == pytest.approx(kinds, abs=0.15)


@pytest.mark.slow
def test_a_late_rank_is_named(data: Path) -> None:
    """Rank 2 of dlrm begins 6.887 ms after rank 1, and its first collective holds up the others."""
    table = etloom.analyze(opened(data, "dlrm"), "critical-path")
    ranks = dict(table.select("kind", "rank").iter_rows())
    assert (ranks["later start"], ranks["transfer"], ranks["segment"]) == (2, 3, None)
    (said,) = critical_path.remarks(table)
    assert said.startswith(
        "later start: for 6.887 ms (34 % of the time) no recorded dependency explains the start of the path"
    )
    assert "on rank 2:" in said
    edges = etloom.analyze(opened(data, "dlrm"), "critical-path", by="edge")
    assert edges.row(0, named=True)["rank"] == 2 and list(critical_path.remarks(edges)) == [said]
    assert not list(
        critical_path.remarks(etloom.analyze(opened(data, "dlrm"), "critical-path", by="operator"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "explainable"),
    [
        ("hta_multirank", False),
        ("hta_misc/negative_queue_a100.json.gz", False),
        ("dlrm", True),
        ("tracelens/h100_qwen.json.gz", True),
    ],
)
def test_slack_is_uncertain_if_the_graph_does_not_explain_the_times(
    name: str, explainable: bool, data: Path
) -> None:
    table = etloom.analyze(opened(data, name), "slack")
    assert table["explainable"].unique().to_list() == [explainable]
    doubt = "do not rely on these slacks: the graph does not explain the recording"
    assert [line.partition(";")[0] for line in slack.remarks(table)] == ([] if explainable else [doubt])


def saved(graph: Graph, lag: np.ndarray) -> float:
    """Of the makespan, percent."""
    return (
        100
        * (graph.time.max() - algorithms.compute_times(graph, lag).max())
        / algorithms.compute_makespan(graph)
    )


@pytest.mark.slow
def test_half_the_kernel_time_of_a_device_bound_recording(data: Path) -> None:
    for name, expected in (("tracelens/h100_qwen.json.gz", 18.2), ("tracelens/mi300_qwen.json.gz", 22.8)):
        graph = build_graph(opened(data, name)).graph
        lag = np.where(graph.kind == EdgeKind.KERNEL, graph.min_latency // 2 + graph.unexplained, graph.lag)
        assert saved(graph, lag) == pytest.approx(expected, abs=0.1)


def free_communication(job: Job) -> float:
    graph = build_graph(job).graph
    names = {rank: trace.events["name"].cast(pl.String).to_list() for rank, trace in job.items()}
    rank = graph.rank[graph.target]
    chosen = graph.kind == EdgeKind.TRANSFER
    for edge in np.flatnonzero(graph.kind == EdgeKind.KERNEL):
        chosen[edge] = names[int(rank[edge])][int(graph.owner[edge])].startswith("nccl")
    return saved(graph, np.where(chosen, 0, graph.lag))


@pytest.mark.slow
def test_one_rank_predicts_more_gain_than_all_ranks(data: Path) -> None:
    """The long collective of rank 0 is a wait for slower ranks."""
    assert free_communication(opened(data, "dlrm")) == pytest.approx(2.3, abs=0.3)
    assert free_communication(opened(data, "dlrm/kineto_trace_0.json.gz")) > 10


@pytest.mark.slow
def test_collectives_are_matched_across_ranks(data: Path) -> None:
    for name, each, alone in (("dlrm", 8, 0), ("cpu/ddp_2", 2, 0), ("hta_multirank", 2, 8)):
        for counts in build_graph(opened(data, name)).counts.values():
            assert (counts["matched_communications"], counts["local_communications"]) == (each, alone), name
    found = build_graph(opened(data, "cpu/pp_4"))
    assert (found.graph.kind == EdgeKind.MESSAGE).sum() == 2 * 48
    assert sum(counts["local_communications"] for counts in found.counts.values()) == 0
    counts = build_graph(opened(data, "cpu/coll_4")).counts.values()
    assert sum(one["local_communications"] for one in counts) == 0


def test_the_critical_path_that_hta_finds(data: Path, golden: Path) -> None:
    """All of its host events are on ours. Its kernels are not: they were done 235 us before the host asked."""
    job = opened(data, "critical_path/simple_add.json.gz")
    theirs = pl.read_csv(golden / "hta" / "simple_add_cp" / "critical_path.csv").drop_nulls("event_idx")
    events = job[0].events.select(
        "id", "ts", "dur", pl.col("position").cast(pl.Int64), pl.col("cat").cast(str)
    )
    theirs = theirs.select(pl.col("event_idx").cast(pl.Int64).alias("position")).unique()
    theirs = theirs.join(events, on="position")
    ours = etloom.analyze(job, "critical-path", by="edge")["event"].drop_nulls()
    missing = theirs.filter(~pl.col("id").cast(pl.Int64).is_in(ours.implode()))
    assert theirs.height == 158
    assert sorted(missing["cat"]) == ["gpu_memset", *["kernel"] * 5]
    syncs = job[0].events.filter(pl.col("name").cast(str) == "cudaDeviceSynchronize")["ts"]
    done = (missing["ts"] + missing["dur"]).max()
    assert min(ts - done for ts in syncs if ts > done) == 235_000  # type: ignore[operator]


# ── small ones, by hand ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return etloom.open(
        small_traces.write_run(tmp_path_factory.mktemp("dependencies") / "run"), use_cache=False
    )


@pytest.mark.slow
def test_a_run_known_by_heart(run: Job) -> None:
    """The host runs from 100 to 1100 us, so kernels that end at 1000 and 1050 have that much to spare."""
    table = etloom.analyze(run, "critical-path")
    assert table.select("kind", "time_ns", "pct").rows() == [("segment", 1_000_000, 100.0)]
    by_name = etloom.analyze(run, "critical-path", by="name").select("name", "time_ns").rows()
    assert sorted(by_name) == [
        ("ProfilerStep#3", 580_000),
        ("aten::linear", 150_000),
        ("aten::mm", 230_000),
        ("cudaLaunchKernel", 40_000),
    ]
    spare = etloom.analyze(run, "slack")
    known = {row["name"]: row["min_ns"] for row in spare.iter_rows(named=True)}
    assert known["gemm"] == 100_000
    assert known["ncclDevKernel_AllReduce_Sum"] == 50_000
    assert known["aten::linear"] == 0


def test_the_path_of_a_step_begins_and_ends_with_it(run: Job) -> None:
    table = etloom.analyze(run, "critical-path", step=3, rank=1, by="edge")
    assert table["start_ns"].min() == small_traces.BASE_NS + 100_000
    assert table["time_ns"].sum() == 1_000_000
    assert (table["start_ns"][1:] == (table["start_ns"] + table["time_ns"])[:-1]).all()
    with pytest.raises(AnalysisError, match="the trace contains no step 4"):
        etloom.analyze(run, "critical-path", step=4)
    with pytest.raises(AnalysisError, match="unknown rank 9"):
        etloom.analyze(run, "critical-path", rank=9)
    with pytest.raises(UnknownName, match="grouping"):
        etloom.analyze(run, "critical-path", by="colour")
    with pytest.raises(InvalidValue, match="expected at least 1 row, got 0"):
        etloom.analyze(run, "critical-path", top=0)


def test_the_first_rows_of_the_path_and_of_slack(run: Job) -> None:
    pieces = etloom.analyze(run, "critical-path", by="edge")
    longest = etloom.analyze(run, "critical-path", by="edge", top=2)
    assert longest["time_ns"].to_list() == sorted(pieces["time_ns"], reverse=True)[:2]
    by_name = etloom.analyze(run, "critical-path", by="name")
    assert etloom.analyze(run, "critical-path", by="name", top=2).equals(by_name.head(2))
    assert by_name.height > 2
    assert etloom.analyze(run, "slack", top=3).equals(etloom.analyze(run, "slack").head(3))
    (rank_help,) = (
        one.help for one in registry.list_options("analyses", "critical-path") if one.name == "rank"
    )
    assert "last event of this rank" in rank_help


def test_the_residual_of_a_job_is_of_the_time_of_all_its_ranks(run: Job) -> None:
    table = etloom.analyze(run, "graph-quality")
    *ranks, whole = table.rows(named=True)
    assert len(ranks) == 2 and whole["residual_ns"] > 0
    assert whole["residual_pct"] == 100 * whole["residual_ns"] / sum(row["makespan_ns"] for row in ranks)


def test_a_step_that_not_all_ranks_have() -> None:
    ranks = {}
    for rank, last in ((0, 4), (1, 3)):
        steps = [
            event("user_annotation", f"ProfilerStep#{n}", 100 * n, 100 * n + 90 + rank) for n in (3, last)
        ]
        ranks[rank] = linked(*steps[: last - 2], event("cpu_op", "aten::mm", 300, 301), rank=rank)
    job = Job(ranks)
    path = etloom.analyze(job, "critical-path", step=4, by="edge")
    assert (path["rank"].unique().to_list(), path["time_ns"].sum()) == ([0], 90_000)
    with pytest.raises(AnalysisError, match="rank 1: the trace contains no step 4"):
        etloom.analyze(job, "critical-path", step=4, rank=1)
    with pytest.raises(AnalysisError, match="the trace contains no step 5"):
        etloom.analyze(job, "critical-path", step=5)


def test_a_trace_that_is_not_linked_is_refused() -> None:
    with pytest.raises(LinkError, match="not linked"):
        build_graph(Trace({}, {"rank": 3}))


def event(cat: str, name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
    """Times in us."""
    own = {"pid": 1, "tid": 1} if cat not in ("kernel", "cuda_sync") else {"pid": 0, "device": 0}
    return {
        "cat": cat,
        "name": name,
        "ts": 1000 * start,
        "dur": 1000 * (end - start),
        "ph": "X",
        **own,
        **more,
    }


def linked(*events: dict[str, Any], rank: int = 0) -> Trace:
    order = sorted(events, key=lambda one: (one["ts"], -one["dur"]))
    rows = [{"id": n, "position": n, **one} for n, one in enumerate(order)]
    return etloom.link(Trace({"events": pl.DataFrame(rows, infer_schema_length=None)}, {"rank": rank}))


def edges(graph: Graph, trace: Trace, kind: EdgeKind) -> list[tuple[str, str, int]]:
    """(source, target, min_latency in us) of the edges of a kind."""
    names = [*trace.events["name"].cast(pl.String), "all"]
    chosen = np.flatnonzero(graph.kind == kind)
    target = graph.target
    return [
        (
            f"{names[graph.event[graph.source[e]]]}.{PointRole(graph.role[graph.source[e]]).name.lower()}",
            f"{names[graph.event[target[e]]]}.{PointRole(graph.role[target[e]]).name.lower()}",
            int(graph.min_latency[e]) // 1000,
        )
        for e in chosen
    ]


def kernel(name: str, start: int, end: int, stream: int, correlation: int) -> dict[str, Any]:
    return event("kernel", name, start, end, stream=stream, tid=stream, correlation=correlation)


def call(start: int, end: int, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event("cuda_runtime", name, start, end, correlation=correlation)


FLOORS = MinimumLatencies(submission=10_000, launch=10_000, stream=2_000, sync=3_000)


def test_work_leaves_from_within_a_slow_launch_call() -> None:
    trace = linked(
        call(0, 100, 1), kernel("early", 50, 60, 7, 1), call(200, 210, 2), kernel("a", 220, 230, 7, 2)
    )
    graph = build_graph(trace, FLOORS).graph
    assert edges(graph, trace, EdgeKind.LAUNCH) == [
        ("cudaLaunchKernel.submit", "early.start", 10),
        ("cudaLaunchKernel.end", "a.start", 10),
    ]
    assert graph.time[graph.role == PointRole.SUBMIT].tolist() == [40_000]


def test_work_of_a_launch_out_of_sight_is_waited_for() -> None:
    trace = linked(
        call(0, 100, 9, "cudaDeviceSynchronize"), kernel("lost", 50, 97, 7, 0), kernel("before", 10, 48, 7, 0)
    )
    graph = build_graph(trace, FLOORS).graph
    assert edges(graph, trace, EdgeKind.SYNC) == [("lost.end", "cudaDeviceSynchronize.end", 3)]
    assert edges(graph, trace, EdgeKind.WAIT) == [
        ("cudaDeviceSynchronize.start", "cudaDeviceSynchronize.end", 2)
    ]
    assert edges(graph, trace, EdgeKind.STREAM) == [("before.end", "lost.start", 2)]


def test_with_two_clocks_a_wait_may_end_before_its_dependency() -> None:
    trace = linked(call(0, 5, 1), kernel("long", 20, 108, 7, 1), call(10, 100, 2, "cudaDeviceSynchronize"))
    found = build_graph(trace, FLOORS)
    assert found.counts[0]["skewed_waits"] == 1
    assert edges(found.graph, trace, EdgeKind.SYNC) == [("all.end", "cudaDeviceSynchronize.end", 0)]
    assert edges(found.graph, trace, EdgeKind.KERNEL) == [
        ("long.start", "all.end", 80),
        ("long.start", "long.end", 88),
    ]


def test_overlapping_kernels_of_a_stream() -> None:
    trace = linked(
        call(0, 5, 1),
        kernel("long", 20, 100, 7, 1),
        kernel("inside", 30, 40, 7, 1),
        kernel("after", 102, 110, 7, 1),
    )
    graph = build_graph(trace, FLOORS).graph
    assert edges(graph, trace, EdgeKind.OVERLAP) == [("long.start", "inside.start", 0)]
    assert sorted(edges(graph, trace, EdgeKind.STREAM)) == [
        ("inside.end", "after.start", 2),
        ("long.end", "after.start", 2),
    ]


def test_a_late_start_after_work_of_another_stream_was_a_wait_for_it() -> None:
    """Only where the host made some stream wait between the two launches."""
    work = [call(0, 5, 1), kernel("first", 15, 300, 7, 1), call(30, 35, 2), kernel("second", 302, 310, 9, 2)]
    for waits, expected in (
        ([], []),
        ([call(20, 22, 3, "cudaStreamWaitEvent")], [("first.end", "second.start", 2)]),
    ):
        trace = linked(*work, *waits)
        trace = trace.replace(sync_dependencies=trace.sync_dependencies.clear())
        assert edges(build_graph(trace, FLOORS).graph, trace, EdgeKind.STREAM_WAIT) == expected


@pytest.mark.parametrize(("before", "waits"), [(1009, True), (1008, False)])
def test_a_long_launch_call_waits_for_room_in_a_full_queue(before: int, waits: bool) -> None:
    """Ten kernels of ``before`` that were launched out of sight end until the second call returns."""
    trace = linked(
        *(kernel(f"k{n}", 10 * n, 10 * n + 9, 7, 10_000 + n) for n in range(before)),
        call(-20, -15, 1),
        call(6, 106, 2),
        call(200, 215, 3, "cudaLaunchKernelExC"),
        *(kernel("last", 20_000 + 10 * n, 20_000 + 10 * n + 9, 7, n) for n in (1, 2, 3)),
    )
    found = build_graph(trace)
    graph = found.graph
    assert found.counts[0]["inferred_waits"] == int(waits)
    assert edges(graph, trace, EdgeKind.SYNC) == ([("k9.end", "cudaLaunchKernel.end", 0)] if waits else [])
    lag = (
        np.where(graph.kind == EdgeKind.KERNEL, graph.min_latency // 3, graph.min_latency) + graph.unexplained
    )
    returned = algorithms.compute_times(graph, lag)[graph.time == 106_000].max()
    assert returned == (106_000 - 10 * 6_000 if waits else 106_000)


def test_threads_that_only_wait_are_left_aside() -> None:
    trace = linked(
        event("cpu_op", "aten::add", 0, 10),
        event("cuda_runtime", "cudaEventQuery", 0, 500, tid=2),
        event("python_function", "wait", 0, 900, tid=3),
    )
    found = build_graph(trace)
    assert found.counts[0]["threads_aside"] == 2
    assert algorithms.compute_makespan(found.graph) == 10_000


@pytest.mark.parametrize(("end", "aside"), [(150, 1), (210, 0)])
def test_a_thread_that_only_works_inside_ranges_is_left_aside(end: int, aside: int) -> None:
    """What a worker of gloo runs during its range is the time of the range; what it runs after it is not."""
    trace = linked(
        event("cpu_op", "c10d::allreduce_", 0, 10),
        event("cpu_op", "aten::add", 220, 230),
        event("user_annotation", "gloo:all_reduce", 100, 200, tid=2),
        event("cpu_op", "aten::add_", 120, end, tid=2),
    )
    assert build_graph(trace).counts[0]["threads_aside"] == aside


@pytest.mark.parametrize(("begin", "moves_us"), [(420, 400), (5_000, 0)])
def test_a_rest_that_ends_soon_after_a_range_waits_for_it(begin: int, moves_us: int) -> None:
    """An operator that begins long after the range was kept by something else, and does not move with the range."""
    trace = linked(
        event("cpu_op", "c10d::allreduce_", 0, 10),
        event("user_annotation", "gloo:all_reduce", 5, 400),
        event("cpu_op", "aten::add", begin, begin + 10),
    )
    graph = build_graph(trace).graph
    assert ("gloo:all_reduce.end", "aten::add.start", 0) in edges(graph, trace, EdgeKind.RETURN)
    lag = np.where(graph.kind == EdgeKind.COMPLETE, 0, graph.lag)
    moved = graph.time - algorithms.compute_times(graph, lag)
    assert moved[graph.time == begin * 1000].tolist() == [moves_us * 1000]


@pytest.mark.parametrize(
    ("begins", "waits"),
    [
        ((420, 430, 5_000), (True, True, True)),  # the third rank goes on late
        ((5_000, 4_000, 420), (False, False, False)),  # sleeps, one of which ends with the range by chance
        ((420, 5_000), (True, False)),
    ],
)
def test_delays_at_one_place_of_the_program_are_equal(
    begins: tuple[int, ...], waits: tuple[bool, ...]
) -> None:
    traces = {
        rank: linked(
            event("cpu_op", "c10d::allreduce_", 0, 10),
            event("user_annotation", "gloo:all_reduce", 5, 400),
            event("cpu_op", "aten::add", begin, begin + 10),
            rank=rank,
        )
        for rank, begin in enumerate(begins)
    }
    graph = build_graph(Job(traces)).graph
    lag = np.where(np.isin(graph.kind, (EdgeKind.COMPLETE, EdgeKind.TRANSFER)), 0, graph.lag)
    moved = graph.time - algorithms.compute_times(graph, lag)
    starts = [moved[(graph.rank == rank) & (graph.time == begin * 1000)] for rank, begin in enumerate(begins)]
    assert [bool(moves.max() > 0) for moves in starts] == list(waits)


def send(rank: int, peer: int, what: str, start: int, end: int) -> Trace:
    """A call of 10 us that starts a range of gloo on another thread."""
    trace = linked(
        event("cpu_op", f"c10d::{what}", start, start + 10),
        event("user_annotation", f"gloo:{what.strip('_')}", start + 5, end),
        event("cpu_op", "aten::add", end + 20, end + 60),
        rank=rank,
    )
    row = {"id": 0, "event": 0, "collective": what.strip("_"), "peer": peer, "is_p2p": True}
    return trace.replace(comms=pl.DataFrame([row]))


def test_a_message_ends_after_both_have_come_and_is_waited_for() -> None:
    job = Job({0: send(0, 1, "send", 300, 330), 1: send(1, 0, "recv_", 0, 400)})
    found = build_graph(job)
    graph = found.graph
    messages = np.flatnonzero(graph.kind == EdgeKind.MESSAGE)
    assert [(int(graph.rank[graph.target[e]]), int(graph.min_latency[e])) for e in messages] == [
        (0, 30_000),
        (1, 100_000),
    ]
    assert ("gloo:recv.end", "aten::add.start", 0) in edges(graph, job[1], EdgeKind.RETURN)
    # Sent 200 us earlier, it arrives 200 us earlier.
    earlier = graph.time.copy()
    earlier[(graph.rank == 0) & (graph.time == 300_000)] = 100_000
    time = algorithms.compute_times(graph, start=earlier)
    last = int(np.argmax(graph.time))
    assert graph.time[last] - time[last] == 200_000


def test_quality_distinguishes_chance_from_cause() -> None:
    calls = [call(1000 * n, 1000 * n + 5, n + 1) for n in range(30)]
    near = [kernel("k", 1000 * n + 8, 1000 * n + 20, 7, n + 1) for n in range(30)]
    far = [kernel("k", 1000 * n + 300 + 7 * n, 1000 * n + 520, 7, n + 1) for n in range(30)]
    for work, share in ((near, 1.0), (far, 0.0)):
        trace = linked(*calls, *work)
        graph = build_graph(trace).graph
        seen = quality.measure_explained_starts(graph, trace, 0)
        assert (seen.starts, seen.share, seen.by_chance[:2]) == (30, share, (0.0, 0.0))


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Events that may cross, have no length, repeat a correlation, wait for work that starts later, ..."""
    host = st.builds(
        lambda cat, start, dur, tid: event(*cat, start, start + dur, tid=tid),
        st.sampled_from(
            [
                ("cpu_op", "aten::mm"),
                ("cpu_op", "autograd::engine::evaluate_function: Mm"),
                ("cpu_op", "c10d::allreduce_"),
                ("user_annotation", "gloo:all_reduce"),
                ("user_annotation", "backward"),
                ("python_function", "run"),
            ]
        ),
        st.integers(0, 300),
        st.integers(0, 200),
        st.integers(1, 3),
    )
    calls = st.builds(
        lambda name, start, dur, tid, c: event(
            "cuda_runtime", name, start, start + dur, tid=tid, correlation=c
        ),
        st.sampled_from(
            ["cudaLaunchKernel", "cudaDeviceSynchronize", "cudaStreamWaitEvent", "cudaMemcpyAsync"]
        ),
        st.integers(0, 300),
        st.integers(0, 60),
        st.integers(1, 2),
        st.integers(1, 6),
    )
    work = st.builds(
        lambda name, start, dur, stream, c: kernel(name, start, start + dur, stream, c),
        st.sampled_from(["gemm", "ncclDevKernel_AllReduce_Sum"]),
        st.integers(0, 400),
        st.integers(0, 80),
        st.integers(7, 9),
        st.integers(1, 7),
    )
    return draw(st.lists(st.one_of(host, calls, work), min_size=1, max_size=30))


@pytest.mark.slow
@settings(max_examples=examples(20))
@given(st.lists(rows(), min_size=1, max_size=2))
def test_any_trace_has_a_graph_that_gives_its_times(ranks: list[list[dict[str, Any]]]) -> None:
    job = Job({rank: linked(*events, rank=rank) for rank, events in enumerate(ranks)})
    graph = build_graph(job).graph
    assert (algorithms.compute_times(graph) == graph.time).all()
    assert (graph.source < graph.target).all()
    assert pieces_tile(graph)
    chains = [
        EdgeKind.SEGMENT,
        EdgeKind.IDLE,
        EdgeKind.WAIT,
        EdgeKind.KERNEL,
        EdgeKind.STREAM,
        EdgeKind.OVERLAP,
    ]
    assert not graph.dropped[chains].any()
    has_work = any((trace.events["cat"].cast(str) != "user_annotation").any() for trace in job.values())
    if has_work and len(graph) and graph.time.max() > graph.time.min():
        table = etloom.analyze(job, "critical-path", by="edge")
        assert table["time_ns"].sum() == algorithms.compute_makespan(graph)
        etloom.analyze(job, "graph-quality")
        etloom.analyze(job, "slack")
    elif not has_work:
        with pytest.raises(etloom.EtloomError, match="no timed operators and no GPU activity"):
            etloom.analyze(job, "slack")


def test_a_parent_that_ended_as_its_child_starts_ends_none_around_it() -> None:
    """In traces of microseconds a sibling may begin before a call ends, and the child of the call after it."""
    start, end = np.array([0, 10, 10, 11, 50]), np.array([100, 11, 10, 11, 60])
    depth, parent = np.array([0, 1, 1, 2, 1], np.int16), np.array([-1, 0, 0, 1, 0], np.int32)
    marked, thread = np.ones(5, bool), np.zeros(5, np.int32)
    calls, submission = np.zeros(0, np.int32), np.zeros(0, np.int64)
    _, _, time, _, _, ends, _ = _native.tour(marked, thread, start, end, depth, parent, calls, submission)
    assert time[ends].tolist() == [100, 10, 10, 11, 60]


def test_shares_of_a_path_that_lasts_for_years() -> None:
    row = {"kind": ["segment"], "category": [None], "time_ns": [1 << 62]}
    path = pl.DataFrame(row, schema={"kind": pl.String, "category": pl.String, "time_ns": pl.Int64})
    assert critical_paths.format_path_shares(path, digits=1, most=4) == ["100.0 % host operators and calls"]
