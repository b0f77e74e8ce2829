"""Causes in recordings as people make them: cold starts, engines that run ahead, gaps with several causes."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.analyses.findings.gaps import MIN_GAP_NS
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals
from support.examples import examples
from support.small_traces import RankBuilder, complete_event, find_rows

LOAD = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def measure_causes(path: Path) -> dict[str, int]:
    """The idle time of rank 0 by cause, ns."""
    gaps = RankView(etloom.link(etloom.open(path)[0])).gaps
    return dict(gaps.group_by(pl.col("cause").cast(pl.String)).agg(pl.col("gap_ns").sum()).iter_rows())


def test_idle_time_inside_slow_launch_calls_is_that_of_the_calls(data: Path) -> None:
    path = data / "cases/turn3/lazy_launch.json"
    assert measure_causes(path) == {"call": pytest.approx(40e6 - 150e3, abs=20e3)}
    rows = etloom.analyze(etloom.open(path), "findings", min_pct=0)
    assert rows["pattern"].to_list() == ["slow-calls"]


@pytest.mark.parametrize(
    ("begin", "call_us", "cause"), [(50, 3_000, "call"), (130, 3_000, "call"), (50, 600, "launch")]
)
def test_a_gap_belongs_to_the_launch_until_it_returns(
    begin: int, call_us: int, cause: str, tmp_path: Path
) -> None:
    """The device works from 10 to 110; the call that launches its next work begins before or after that."""
    end = begin + call_us
    run = RankBuilder().step(1, 0, end + 200).op("aten::mm", 0, 20).kernel(5, 10, 100)
    run.op("aten::mm", begin - 5, call_us + 10).kernel(begin, end - 2, 150, call_us=call_us)
    gaps = RankView(etloom.link(run.trace(tmp_path))).gaps
    between = gaps.filter(
        pl.col("end") - gaps["start"].min() < 1000 * end, pl.col("start") - gaps["start"].min() >= 100_000
    )
    inside = between.filter(pl.col("cause") == cause)["gap_ns"].sum()
    assert inside == 1000 * (end - 2 - max(begin if cause == "call" else 0, 110))
    assert gaps.filter(pl.col("cause") == "device").is_empty()


def test_time_before_the_first_device_event_is_unknown(data: Path) -> None:
    path = data / "cases/turn3/device_behind_at_start.json"
    assert measure_causes(path) == {"unrecorded": 20_000_000}
    rows = etloom.analyze(etloom.open(path), "findings", min_pct=0)
    assert rows["pattern"].to_list() == ["unrecorded-time"] and "unknown, not idle" in rows["title"][0]


def test_unknown_time_comes_after_every_cause(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::mm", 0, 20).kernel(5, 9_000, 100)
    run.op("aten::mm", 9_200, 20).kernel(9_205, 9_210, 10)
    rows = etloom.analyze(run.trace(tmp_path), "findings", min_pct=0)
    assert rows["pattern"].to_list()[-1] == "unrecorded-time" and rows.height > 1


def test_work_that_was_launched_and_not_recorded_is_no_idle_time_at_the_end(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 9_000).op("aten::mm", 0, 20).kernel(5, 10, 100)
    run.op("cudaLaunchKernel", 3_000, 10, "cuda_runtime", correlation=77)
    gaps = RankView(etloom.link(run.trace(tmp_path))).gaps
    assert gaps.filter(pl.col("cause") == "unrecorded")["gap_ns"].to_list() == [6_000_000]


def test_operators_that_make_views_do_not_compute(data: Path) -> None:
    rows = etloom.analyze(etloom.open(data / "cases/turn3/views_only/kineto_views.json"), "findings")
    assert rows["pattern"][0] == "launch-bound" and "host-compute" not in rows["pattern"]


def test_a_gap_after_the_last_kernel_is_no_data_loading(data: Path) -> None:
    rows = etloom.analyze(etloom.open(data / "cases/turn3/trailing_gap.json.gz"), "findings", min_pct=0)
    costs = dict(rows.select("pattern", "cost_ns").iter_rows())
    assert rows["pattern"][0] == "idle-host" and costs["idle-host"] > 110e6
    assert costs["data-loading"] <= 620_000


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.integers(1, 1_000), st.integers(20, 2_000)), min_size=1, max_size=4),
    st.integers(500, 6_000),
)
def test_a_gap_is_shared_by_overlap(
    tmp_path_factory: pytest.TempPathFactory, loads: list[tuple[int, int]], launch: int
) -> None:
    run = RankBuilder().step(1, 0, launch + 300).op("aten::mm", 0, 20).kernel(5, 10, 100)
    starts, ends, at = [], [], 120
    for pause, duration in loads:
        run.op(LOAD, at + pause, duration, "user_annotation")
        at += pause + duration
        starts.append(1000 * (at - duration))
        ends.append(1000 * at)
    run.op("aten::mm", launch - 5, 20).kernel(launch, launch + 5, 290)
    trace = run.trace(tmp_path_factory.mktemp("run"))
    gaps = RankView(etloom.link(trace)).gaps
    idle = Intervals.of([110_000], [1000 * launch + 5_000])
    loading = Intervals.of(starts, ends) & idle
    shared = gaps.filter((pl.col("cause") == "data") & ~pl.col("is_late_effect"))["gap_ns"].sum()
    assert abs(shared - loading.total) <= 2 * (len(loads) + 1) * MIN_GAP_NS
    assert gaps["gap_ns"].sum() <= idle.total + 20_000


def test_slow_calls_of_a_cold_recording_come_first(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 60_000).op("aten::mm", 0, 20).kernel(5, 10, 100)
    for number in range(5):
        at = 200 + 10_000 * number
        run.op("aten::mm", at, 9_500).kernel(at + 5, at + 9_400, 500, call_us=9_400)
    assert [row["pattern"] for row in find_rows(run.trace(tmp_path), "slow-calls")] == ["slow-calls"]
    assert find_rows(run.trace(tmp_path), "device-waits") == []


def test_products_at_a_small_share_of_the_roofline_are_a_cause(data: Path) -> None:
    rows = etloom.analyze(
        etloom.open(data / "cases/turn3/slow_gemm.json"), "findings", pattern="slow-operators"
    )
    assert rows["cost_ns"].to_list() == [pytest.approx(28.6e6, abs=0.05e6)]
    assert rows["operator"][0] == "aten::mm" and "4.6 %" in rows["title"][0]


@pytest.mark.parametrize(
    ("dtype", "duration_us", "is_slow"),
    [("c10::BFloat16", 200_000, True), ("c10::BFloat16", 10_000, False), ("float", 200_000, False)],
)
def test_products_in_an_emulated_type_are_a_cause(
    dtype: str, duration_us: int, is_slow: bool, tmp_path: Path
) -> None:
    """A product of 302 MFLOP: 1.5 GFLOP/s in 200 ms, 30 in 10 ms."""
    run = RankBuilder().step(1, 0, 10 * duration_us)
    shapes = {"Input Dims": [[1024, 192], [192, 768]], "Input type": [dtype, dtype]}
    for number in range(8):
        run.op("aten::mm", number * duration_us, duration_us - 10, **shapes)
    rows = etloom.analyze(run.trace(tmp_path), "findings", pattern="slow-operators", min_pct=0)
    assert rows.height == is_slow
    if is_slow:
        assert rows["confidence"][0] == "medium" and rows["cost_ns"][0] == pytest.approx(1.52e9, rel=0.02)


def build_forwards(names: tuple[str, ...], count: int, pause_us: int = 0) -> RankBuilder:
    """Steps of 4 ms whose forward begins with operators of 100 us, each of which launches a kernel; the host pauses
    after the first one."""
    run = RankBuilder()
    for step in range(count):
        at = 4_000 * step
        run.step(step, at, 3_900)
        run.op("DistributedDataParallel.forward", at + 10, 3_000, "user_annotation")
        for place, name in enumerate((*names, "aten::conv2d")):
            start = at + 20 + 110 * place + (pause_us if place else 0)
            run.op(name, start, 100).kernel(start + 10, start + 20, 30)
    return run


BUFFERS = ("aten::flatten_dense_tensors", "c10d::broadcast_", "aten::unflatten_dense_tensors", "aten::copy_")


@pytest.mark.parametrize(
    ("names", "count", "pause_us", "rows"),
    [(BUFFERS, 3, 0, 1), (BUFFERS, 3, 1_500, 1), (BUFFERS, 1, 0, 0), (BUFFERS[::2], 3, 0, 0)],
)
def test_broadcasts_of_buffers_are_named(
    names: tuple[str, ...], count: int, pause_us: int, rows: int, tmp_path: Path
) -> None:
    trace = build_forwards(names, count, pause_us).trace(tmp_path)
    table = etloom.analyze(trace, "findings", pattern="buffer-broadcasts", min_pct=0)
    assert table.height == rows
    if rows:
        assert table["step_cost_ns"][0] == pytest.approx(430_000, abs=15_000)
        assert "broadcast_buffers=False" in table["advice"][0]


@pytest.mark.slow
def test_broadcasts_of_buffers_in_a_recording(data: Path) -> None:
    rows = etloom.analyze(etloom.open(data / "nccl_ddp"), "findings")
    assert rows["pattern"].to_list()[:2] == ["launch-bound", "buffer-broadcasts"]
    assert "host-compute" not in rows["pattern"]


def test_a_synchronization_that_begins_after_the_device_fell_idle_waits_for_nothing(tmp_path: Path) -> None:
    """The device works from 10 to 110, and again from 900 on; the host synchronizes in between."""
    run = RankBuilder().step(1, 0, 1_200).op("aten::mm", 0, 20).kernel(5, 10, 100)
    run.op("cudaDeviceSynchronize", 600, 5, "cuda_runtime", correlation=77)
    run.op("aten::mm", 880, 30).kernel(890, 900, 200)
    gaps = RankView(etloom.link(run.trace(tmp_path))).gaps.filter(pl.col("gap_ns") > 500_000)
    assert gaps["cause"].cast(pl.String).to_list() == ["launch"]


@pytest.mark.slow
@pytest.mark.parametrize("frames", [False, True])
def test_the_capture_of_a_graph_is_no_steady_state(frames: bool, tmp_path: Path) -> None:
    """From 200 to 5,000 the host captures a graph, and waits for the device meanwhile."""
    run = RankBuilder().step(1, 0, 6_000).op("aten::mm", 0, 20).kernel(5, 10, 100)
    if frames:
        run.op("torch/cuda/graphs.py(98): capture_begin", 200, 10, "python_function")
        run.op("torch/cuda/graphs.py(119): capture_end", 4_990, 10, "python_function")
    else:
        run.op("cudaStreamBeginCapture", 200, 5, "cuda_runtime").op(
            "cudaStreamEndCapture", 4_990, 10, "cuda_runtime"
        )
    run.op("cudaDeviceSynchronize", 220, 5, "cuda_runtime", correlation=77)
    run.op("aten::mm", 5_050, 30).kernel(5_060, 5_070, 500)
    rows = etloom.analyze(run.trace(tmp_path), "findings", min_pct=1)
    first = rows.row(0, named=True)
    assert (first["pattern"], first["confidence"]) == ("recompilation", "low")
    assert first["title"].startswith("device graphs are captured once") and first["cost_ns"] == 4_800_000
    assert "host-sync" not in rows["pattern"]


def test_the_first_launch_of_a_recording_without_steps_is_not_late(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::add", 0, 200).kernel(100, 158, 400, call_us=50)
    for at in range(210, 260, 10):
        run.op("aten::add", at, 8).kernel(at + 1, 158 + 40 * (at - 200), 390)
    assert find_rows(run.trace(tmp_path), "launch-bound") == []


@pytest.mark.parametrize(("backend", "confidence"), [("nccl", "low"), ("gloo", "medium")])
def test_host_times_of_a_job_on_gpus_are_no_measure_of_its_work(
    backend: str, confidence: str, tmp_path: Path
) -> None:
    """Without the device's activities, operators that launch copies seem to be copies."""
    run = RankBuilder().step(1, 0, 1_000).op(f"{backend}:all_reduce", 5, 10)
    for at in range(20, 900, 100):
        run.op("aten::to", at, 50).op("aten::copy_", at + 2, 46)
    (row,) = find_rows(run.trace(tmp_path), "copies")
    assert row["confidence"] == confidence
    assert ("GPU activity is not recorded" in row["title"]) == (backend == "nccl")


def test_calls_before_the_first_launch_create_the_context(tmp_path: Path) -> None:
    run = RankBuilder().op("cudaDeviceGetStreamPriorityRange", 100, 90_000, "cuda_runtime", correlation=77)
    for at in (100_000, 101_000):
        run.op("aten::mm", at, 100).kernel(at + 10, at + 30, 500)
    (row,) = find_rows(run.trace(tmp_path), "slow-calls")
    assert (row["cost_ns"], row["name"]) == (90_000_000, "cudaDeviceGetStreamPriorityRange")
    assert "before the first launch, 90.0 ms in all, cudaDeviceGetStreamPriorityRange" in row["title"]


def write_ranks(folder: Path, times: list[int], *, communicates: bool = False) -> Path:
    """A job of ranks with three steps each, which take these times (us)."""
    folder.mkdir()
    for rank, time in enumerate(times):
        run = RankBuilder()
        for number in range(3):
            at = number * time
            run.step(number, at, time).op("aten::mm", at + 5, 50).kernel(at + 10, at + 20, time - 100)
            if communicates:
                run.all_reduce(at + 70, at + time - 50, 20, number)
        run.trace(folder, distributedInfo={"rank": rank, "world_size": len(times)})
        (folder / "kineto_trace_0.json").rename(folder / f"rank_{rank}.json")
    return folder


@pytest.mark.slow
@given(
    times=st.lists(st.integers(10_000, 10_400), min_size=3, max_size=12),
    excess=st.sampled_from([0, 5, 20, 80]),
    data=st.data(),
)
@settings(max_examples=examples(6), deadline=None)
def test_the_slow_rank_of_a_job_without_communication_is_named(
    times: list[int], excess: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    slow = data.draw(st.integers(0, len(times) - 1))
    times[slow] = 10_400 * (100 + excess) // 100
    path = write_ranks(tmp_path_factory.mktemp("job") / "run", times)
    rows = etloom.analyze(etloom.open(path), "findings", pattern="slow-ranks", min_pct=0)
    assert rows["rank"].to_list() == ([slow] if excess >= 20 else [])
    if excess >= 20:
        median = int(pl.Series(times).median() or 0)
        assert rows["cost_ns"].to_list() == [pytest.approx(3000 * (times[slow] - median), rel=0.01)]


@pytest.mark.slow
def test_ranks_that_communicate_are_left_to_stragglers(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "run", [10_000, 10_000, 10_000, 20_000], communicates=True)
    rows = etloom.analyze(etloom.open(path), "findings", min_pct=0)
    assert "slow-ranks" not in rows["pattern"].to_list()


@pytest.mark.slow
def test_the_slow_rank_of_its_kind_is_named(data: Path) -> None:
    rows = etloom.analyze(etloom.open(data / "cases/turn3/fleet_bimodal/run"), "findings")
    assert rows.filter(pattern="slow-ranks").select("rank", "cost_ns").rows() == [(20, 12_000_000)]


@pytest.mark.slow
def test_findings_on_a_sample_of_a_recording_have_low_confidence(data: Path) -> None:
    rows = etloom.analyze(etloom.open(data / "hta_multirank"), "findings", min_pct=0)
    assert rows.height and set(rows["confidence"]) == {"low"}


@given(wait_us=st.integers(2, 300), late_us=st.integers(20, 900))
@settings(max_examples=examples(10), deadline=None)
def test_a_wait_costs_at_most_the_time_for_which_it_blocked(
    wait_us: int, late_us: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The device works from 10 to 1,010; the host waits until then, and launches the next kernel ``late_us`` later."""
    run = RankBuilder().step(1, 0, 3000).op("aten::mm", 0, 20).kernel(5, 10, 1000)
    run.op("cudaDeviceSynchronize", 1010 - wait_us, wait_us, "cuda_runtime", correlation=77)
    run.op("aten::mm", 1010 + late_us - 5, 20).kernel(1010 + late_us, 1014 + late_us, 100)
    gaps = RankView(etloom.link(run.trace(tmp_path_factory.mktemp("run")))).gaps
    between = gaps.filter(pl.col("start") >= 1_010_000, pl.col("start") < 1_014_000 + 1000 * late_us)
    by_cause = dict(between.group_by(pl.col("cause").cast(pl.String)).agg(pl.col("gap_ns").sum()).iter_rows())
    gap = 1000 * (late_us + 4)
    assert by_cause["sync"] == min(1000 * wait_us, gap)
    assert gap - MIN_GAP_NS < sum(by_cause.values()) <= gap and set(by_cause) <= {"sync", "launch"}


def test_launches_that_stay_late_are_due_to_the_longest_wait(tmp_path: Path) -> None:
    """A wait of 1 ms; all later launches are late, also those after a wait of 5 us."""
    run = RankBuilder().step(1, 0, 4000).op("aten::mm", 0, 20).kernel(5, 10, 1100)
    run.op("cudaDeviceSynchronize", 110, 1000, "cuda_runtime", correlation=77)
    for at in range(1150, 1550, 40):
        run.op("aten::mm", at, 10).kernel(at + 2, at + 5, 20)
    run.op("aten::item", 1568, 8).op("cudaStreamSynchronize", 1571, 5, "cuda_runtime", correlation=78)
    for at in range(1590, 1990, 40):
        run.op("aten::mm", at, 10).kernel(at + 2, at + 5, 20)
    trace = etloom.link(run.trace(tmp_path))
    (row,) = find_rows(trace, "host-sync")
    assert "in cudaDeviceSynchronize once" in row["title"]
    (first,) = trace.events.filter(pl.col("name") == "cudaDeviceSynchronize")["id"]
    waits = RankView(trace).gaps.filter(cause="sync")
    of_first = waits.filter(event=first)["gap_ns"].sum()
    assert of_first > 0.9 * waits["gap_ns"].sum() > 200_000


def test_a_call_that_delays_several_launches_counts_once(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 9000).op("aten::mm", 0, 20).kernel(5, 10, 100)
    run.op("aten::mm", 200, 3000).kernel(210, 2900, 50, call_us=2900).kernel(3120, 3130, 50)
    for at in (3200, 3300, 3400):
        run.op("aten::mm", at, 20).kernel(at + 5, at + 10, 20)
    (row,) = find_rows(run.trace(tmp_path), "slow-calls")
    assert row["count"] == 1 and "once: cudaLaunchKernel" in row["title"]


def test_one_gap_that_makes_up_most_is_named(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 4000).op("aten::mm", 0, 20).kernel(5, 10, 100)
    for at in (2500, 2700, 2900, 3100):
        run.op("aten::mm", at, 20).kernel(at + 5, at + 10, 100)
    run.op("aten::empty", 150, 2300)
    (row,) = find_rows(run.trace(tmp_path), "launch-bound")
    assert "most of it in 1 gap of 2 ms" in row["title"] and "check on the timeline" in row["advice"]


def test_communication_of_few_bytes_is_a_matter_of_latency(tmp_path: Path) -> None:
    def find_advice(elements: int) -> str:
        run = RankBuilder().step(1, 0, 4000).op("aten::mm", 0, 20).kernel(5, 10, 100)
        for number in range(3):
            run.all_reduce(200 + 500 * number, 210 + 500 * number, 400, number, elements)
        (row,) = find_rows(run.trace(tmp_path), "exposed-communication")
        return str(row["advice"])

    assert "latency, not bandwidth" in find_advice(1000)
    assert "--bandwidth" in find_advice(10_000_000)


def test_a_pause_inside_an_annotation_is_named_by_it(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 40_000).op("aten::mm", 0, 500)
    run.op("## backward ##", 1000, 34_000, "user_annotation").op("aten::add", 36_000, 500)
    other = complete_event("user_annotation", "upload", 1000, 34_500, 100, 200)  # of another thread
    run.events.append(other)
    (row,) = find_rows(run.trace(tmp_path), "idle-host")
    assert "inside '## backward ##'" in row["title"]


def test_few_activities_are_no_proof_of_slow_launches(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 2000).op("aten::mm", 1000, 20).kernel(1005, 1010, 2)
    assert {row["confidence"] for row in find_rows(run.trace(tmp_path), "launch-bound")} == {"low"}


def test_long_calls_count_on_the_host_where_no_gpu_activity_is_recorded(tmp_path: Path) -> None:
    run = (
        RankBuilder().op("aten::mm", 0, 9000).op("cudaLaunchKernel", 10, 8000, "cuda_runtime", correlation=7)
    )
    (row,) = find_rows(run.trace(tmp_path), "slow-calls")
    assert (row["cost_ns"], row["confidence"], row["name"]) == (8_000_000, "low", "cudaLaunchKernel")


def test_ranks_without_time_are_not_compared(tmp_path: Path) -> None:
    """The median of four ranks is 0."""
    for rank, time in enumerate((0, 0, 0, 500)):
        run = RankBuilder().step(1, 0, time).op("aten::mm", 0, time)
        run.trace(tmp_path, distributedInfo={"rank": rank, "world_size": 4})
        (tmp_path / "kineto_trace_0.json").rename(tmp_path / f"rank_{rank}.json")
    rows = etloom.analyze(etloom.open(tmp_path), "findings", pattern="slow-ranks", min_pct=0)
    assert rows.is_empty()
