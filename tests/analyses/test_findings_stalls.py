"""Stalls of the host while the GPU idles, the late launches that they cause, and a device whose clock changes."""

from __future__ import annotations

from pathlib import Path

import pytest

import etloom
from etloom.analyses.findings.rank_view import RankView
from etloom.core.trace import Trace
from support.small_traces import RankBuilder, complete_event, find_costs, find_rows

COMPILE = "_compile.compile_inner (dynamo_timed)"


def build_synchronized_run(late_launches: int) -> RankBuilder:
    """A synchronization that waits 100 us, and then kernels of 10 us that are launched every 20 us."""
    run = (
        RankBuilder()
        .op("aten::mm", 0, 10)
        .kernel(1, 5, 105)
        .op("cudaDeviceSynchronize", 10, 100, "cuda_runtime")
    )
    for i in range(late_launches):
        run.op("aten::add", 120 + 20 * i, 10).kernel(121 + 20 * i, 125 + 20 * i, 10)
    return run


@pytest.mark.parametrize(("launches", "charged"), [(5, 5), (20, 10)])
def test_late_launches_after_a_synchronization_are_due_to_it_as_long_as_it_waited(
    tmp_path: Path, launches: int, charged: int
) -> None:
    """It waited for 100 us; its own gap is 15 us, each of the following 10 us."""
    gaps = RankView(etloom.link(build_synchronized_run(launches).trace(tmp_path))).gaps
    causes = gaps.filter(gaps["start"] >= 110_000)["cause"].cast(str).to_list()
    assert causes[:charged] == ["sync"] * charged
    assert causes[charged:launches] == ["launch"] * (launches - charged)


def build_stalled_step(name: str = "", stall_us: float = 2_000, cat: str = "cpu_op") -> RankBuilder:
    """A step with two kernels and a stall of the host between them, 100 us of which the first kernel hides."""
    run = RankBuilder().step(1, 0, stall_us + 400).op("aten::mm", 0, 20).kernel(5, 10, 120)
    if name:
        run.op(name, 30, stall_us, cat)
    return run.op("aten::mm", 40 + stall_us, 20).kernel(45 + stall_us, 50 + stall_us, 100)


@pytest.mark.parametrize(
    ("name", "pattern"), [("", "idle-host"), ("aten::addcdiv_", "host-compute"), (COMPILE, "recompilation")]
)
def test_a_gap_is_that_of_the_stall_that_covers_it(tmp_path: Path, name: str, pattern: str) -> None:
    trace = build_stalled_step(name).trace(tmp_path)
    (row,) = find_rows(trace, pattern)
    assert row["cost_ns"] >= 1_800_000
    assert sum(row["cost_ns"] for row in find_rows(trace, "launch-bound")) < 1_000_000


def test_an_idle_host_names_the_function_that_runs(tmp_path: Path) -> None:
    """The operator before the pause ran in main; the pause is in a function that main called next."""
    run = build_stalled_step().op("train.py(9): main", 0, 2_400, "python_function")
    run.op("train.py(3): augment", 25, 2_010, "python_function")
    run.op("<built-in function sorted>", 30, 2_000, "python_function")
    (row,) = find_rows(run.trace(tmp_path), "idle-host")
    assert row["frame"] == "train.py(3): augment"
    assert "train.py(3): augment, which runs <built-in function sorted>" in row["title"]
    assert "record Python stacks" not in row["advice"]


def test_frames_of_another_thread_are_not_named(tmp_path: Path) -> None:
    run = build_stalled_step()
    run.events.append(complete_event("python_function", "watch.py(1): loop", 0, 2_400, 100, 77))
    (row,) = find_rows(run.trace(tmp_path), "idle-host")
    assert row["frame"] is None and "record Python stacks" in row["advice"]


def test_a_short_pause_is_launching(tmp_path: Path) -> None:
    trace = build_stalled_step(stall_us=500).trace(tmp_path)
    assert find_rows(trace, "idle-host") == []
    assert find_rows(trace, "launch-bound") != []


def test_host_compute_names_the_operators(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 3_000).op("aten::mm", 0, 20).kernel(5, 10, 20)
    for i in range(4):
        run.op("aten::addcdiv_", 100 + 300 * i, 200).op("aten::mul_", 300 + 300 * i, 80)
    run.op("aten::mm", 1_300, 20).kernel(1_305, 1_310, 100)
    (row,) = find_rows(run.trace(tmp_path), "host-compute")
    assert "mostly aten::addcdiv_, aten::mul_" in row["title"]
    assert row["confidence"] == "high"


def build_steps(tmp_path: Path, durations: list[float], grids: list[int]) -> Trace:
    """Steps of 60 kernels each, with these durations and launch geometries, one after the other without a gap."""
    run, at = RankBuilder(), 0.0
    for number, (duration, grid) in enumerate(zip(durations, grids, strict=True)):
        run.step(number, at, 62 * duration)
        for i in range(60):
            run.kernel(at + i, at + 60 + i * duration, duration, name=f"gemm_{i % 5}", grid=[grid, 1, 1])
        at += 62 * duration + 60
    return run.trace(tmp_path)


def test_kernels_that_become_slower_are_throttled(tmp_path: Path) -> None:
    trace = build_steps(tmp_path, [100, 100, 110], [8, 8, 8])
    ((cost_ns, count, _),) = find_costs(trace, "throttling")
    assert (cost_ns, count) == (60 * 10_000, 60)
    assert "10 % longer in 1 step of 3" in find_rows(trace, "throttling")[0]["title"]


@pytest.mark.parametrize(
    ("durations", "grids"),
    [([100, 100, 100.5], [8, 8, 8]), ([100, 100, 110], [8, 8, 9]), ([100, 110], [8, 8])],
)
def test_equal_steps_other_shapes_and_two_steps_are_not_throttled(
    tmp_path: Path, durations: list[float], grids: list[int]
) -> None:
    assert find_costs(build_steps(tmp_path, durations, grids), "throttling") == []


def test_allocations_of_every_step_are_not_warm_up(tmp_path: Path) -> None:
    run = RankBuilder()
    for number in range(3):
        run.step(number, 100 * number, 100).op("cudaMalloc", 100 * number + 2, 40, "cuda_runtime")
        run.op("aten::sum", 100 * number + 60, 10).kernel(100 * number + 61, 100 * number + 70, 20)
    assert [row[:2] for row in find_costs(run.trace(tmp_path), "allocator")] == [(120_000, 3)]
