"""What waits for communication, also where it was hidden: seen only if the network is slower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms, build_graph
from etloom.graphs.graph import EdgeKind, Graph, PointRole
from etloom.linker import linked
from support import async_jobs
from support.examples import examples
from support.small_traces import RankBuilder


def scale_transfers(graph: Graph, factor: int) -> np.ndarray:
    """The times of all points if transfers take ``factor`` times as long."""
    lag = np.where(np.isin(graph.kind, (EdgeKind.TRANSFER, EdgeKind.MESSAGE)), graph.lag * factor, graph.lag)
    return algorithms.compute_times(graph, lag)


def find_ends(graph: Graph, rank: int) -> dict[int, int]:
    """The point at the end of each event of a rank."""
    points = np.flatnonzero((graph.rank == rank) & (graph.role == PointRole.END))
    return dict(zip(graph.event[points].tolist(), points.tolist(), strict=True))


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(st.integers(0, 10**9), st.integers(2, 100), st.integers(2, 3))
def test_nothing_runs_before_what_it_waits_for_has_ended(seed: int, factor: int, ranks: int) -> None:
    program = async_jobs.make_program(seed, ranks)
    if not any(instruction.kind == "wait" for instruction in program):
        return
    outcome = async_jobs.simulate(program, ranks)
    graph = build_graph(outcome.job).graph
    assert (algorithms.compute_times(graph) == graph.time).all()
    times = scale_transfers(graph, factor)
    slower = async_jobs.simulate(program, ranks, factor)
    unseen = async_jobs.WAIT_NS * sum(instruction.evidence == "operator" for instruction in program)
    for rank, trace in outcome.job.items():
        ends = find_ends(graph, rank)
        ranges = trace.events.filter(pl.col("name") == "gloo:all_reduce").sort("ts", "id")
        on_thread = trace.events.filter(pl.col("depth").is_not_null())["id"]
        own = np.flatnonzero((graph.rank == rank) & np.isin(graph.event, on_thread))
        for work, row in enumerate(ranges.iter_rows(named=True)):
            ended = times[ends[row["id"]]]
            assert ended >= slower.ends[rank][work] - unseen
            resumed = outcome.resumed[rank][work]
            later = own[graph.time[own] > resumed]
            assert (times[later] >= ended).all(), (work, row)
        steps = trace.events.filter(pl.col("name").cast(pl.String).str.starts_with("ProfilerStep")).sort("ts")
        for number, step in enumerate(steps.iter_rows(named=True)):
            assert times[ends[step["id"]]] >= slower.step_ends[rank][number] - unseen


RECORDINGS = ("cpu/ddp_2", "cpu/coll_4", "cpu/pp_4", "cases/turn3/async_three_waits")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("factor", [2, 20, 100])
def test_no_step_of_a_recording_ends_before_its_collectives(name: str, factor: int, data: Path) -> None:
    opened = etloom.open(data / name)
    check_steps(Job({rank: linked(trace) for rank, trace in opened.items()}), factor)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 100])
def test_no_step_of_our_recording_ends_before_its_collectives(own: Path, factor: int) -> None:
    check_steps(etloom.open(own / "ddp_2"), factor)


def check_steps(job: Job, factor: int) -> None:
    """Every communication of the host that ended in a step ends in it with a slower network, and has a consumer."""
    graph = build_graph(job).graph
    times = scale_transfers(graph, factor)
    for rank, trace in job.items():
        ends = find_ends(graph, rank)
        events = trace.events
        steps = events.filter(
            pl.col("name").cast(pl.String).str.starts_with("ProfilerStep#") & pl.col("depth").is_not_null()
        )
        ranges = events.filter(
            pl.col("name").cast(pl.String).str.contains("^gloo:") & pl.col("depth").is_null()
        )
        assert ranges.height
        for row in ranges.iter_rows(named=True):
            end = row["ts"] + row["dur"]
            assert (graph.source == ends[row["id"]]).any()
            for step in steps.iter_rows(named=True):
                if step["ts"] <= end <= step["ts"] + step["dur"]:
                    assert times[ends[step["id"]]] >= times[ends[row["id"]]]


@pytest.mark.parametrize(("name", "step", "at_least"), [("cpu/ddp_2", 0, 142.0)])
def test_a_hidden_all_reduce_delays_its_step_on_a_slower_network(
    name: str, step: int, at_least: float, data: Path
) -> None:
    table = etloom.simulate(data / name, "comm x20").table
    row = table.filter(pl.col("rank") == 1, pl.col("step") == step)
    assert row["lower_bound_ns"][0] >= at_least * 1e6


@pytest.mark.slow
def test_both_steps_of_three_works_in_flight_wait(data: Path) -> None:
    table = etloom.simulate(data / "cases/turn3/async_three_waits", "comm:all_reduce group=0 x50").table
    assert table.filter(pl.col("scope") == "job")["lower_bound_ns"][0] >= 7.4e9


def build_overlapped_backward(tmp_path: Path) -> Trace:
    """Gemms of 100 us, all-reduces after three of them on a stream of their own, and an optimizer that waits.

    Before each all-reduce its stream waits for the gemms; nothing in the backward waits for an all-reduce.
    """
    run = RankBuilder().step(1, 0, 1_000)
    for number in range(6):
        run.op("aten::mm", 10 + 20 * number, 8).kernel(
            11 + 20 * number, 20 + 102 * number, 100, f"gemm_{number}"
        )
        if number % 2:
            run.op("cudaStreamWaitEvent", 20 + 20 * number, 1, "cuda_runtime")
            run.all_reduce(22 + 20 * number, 125 + 102 * number, 80, number, 1_000)
            run.events[-1]["args"]["stream"] = run.events[-1]["tid"] = 13
    run.op("Optimizer.step#SGD.step", 140, 60, "user_annotation")
    run.op("cudaStreamWaitEvent", 141, 1, "cuda_runtime")
    run.op("aten::add_", 145, 20).kernel(150, 730, 50, "adam")
    return etloom.link(run.trace(tmp_path))


def test_backward_kernels_do_not_wait_for_the_reduction_before_them(tmp_path: Path) -> None:
    trace = build_overlapped_backward(tmp_path)
    graph = build_graph(trace).graph
    names = dict(trace.events.select("id", pl.col("name").cast(pl.String)).iter_rows())
    slower = np.where(
        (graph.kind == EdgeKind.KERNEL)
        & np.array(["nccl" in names.get(owner, "") for owner in graph.owner.tolist()]),
        graph.lag * 10,
        graph.lag,
    )
    times = algorithms.compute_times(graph, slower)
    moved = {
        names[event]: int(times[point] - graph.time[point])
        for point, event in enumerate(graph.event.tolist())
        if event in names and graph.role[point] == PointRole.START
    }
    assert [moved[f"gemm_{number}"] for number in range(6)] == [0] * 6
    assert moved["adam"] > 1_000_000


@pytest.mark.slow
def test_a_rank_of_asynchronous_ranges_alone_has_a_graph(own: Path) -> None:
    trace = etloom.open(own / "ddp_2")[0]
    is_range = pl.col("name").cast(pl.String).str.starts_with("gloo:") & pl.col("depth").is_null()
    alone = trace.replace(events=trace.events.filter(is_range))
    assert len(build_graph(Job({0: alone})).graph)
