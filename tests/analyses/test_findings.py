"""Every anti-pattern: a made trace that shows it, with its cost to the ns, and one that does not."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etloom
from etloom.analyses import findings
from etloom.analyses.findings.finding import MAX_PLACES, Finding, Part, compute_cost, sum_findings
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.findings.rank_view import RankView
from etloom.cli.findings_text import format_findings, is_findings_table
from etloom.core import machine, registry
from etloom.core.intervals import Intervals
from etloom.core.trace import Job, Trace
from etloom.reports.finding_text import PERCENT_BASES
from support import small_traces
from support.real_runs import open_run
from support.small_traces import KERNEL, RankBuilder, find_costs, find_rows

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >()"


def test_launch_bound(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::sum", 0, 20).kernel(1, 5, 10).kernel(3, 15, 10)
    run.op("aten::mean", 30, 40).kernel(60, 65, 10)  # the device is dry from 25 on, the call comes at 60
    trace = run.trace(tmp_path)
    assert find_costs(trace, "launch-bound") == [(40_000, 1, "aten::mean")]
    assert find_costs(trace, "host-sync") == find_costs(trace, "data-loading") == []
    # From the call of the first kernel, at 1.
    assert find_costs(trace, "device-waits") == [(4_000, 1, "aten::sum")]


def test_a_gap_after_the_launch_returned_is_of_the_device(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::sum", 0, 20).kernel(1, 5, 10)
    run.op("aten::mean", 30, 40).kernel(
        60, 1065, 10
    )  # idle from 15 on, the call comes at 60, the kernel 1 ms later
    trace = run.trace(tmp_path)
    ((launch_ns, _, _),) = find_costs(trace, "launch-bound")
    assert 45_000 <= launch_ns < 60_000
    ((device_ns, _, _),) = find_costs(trace, "device-waits")
    assert launch_ns + device_ns == 4_000 + 1_050_000


def test_losses_are_not_per_step_if_the_work_of_the_steps_runs_after_them(tmp_path: Path) -> None:
    run = RankBuilder().op("ProfilerStep#1", 0, 100, "user_annotation")
    run.op("aten::sum", 0, 20).kernel(1, 2_000, 10).kernel(5, 3_000, 10)
    for row in find_rows(run.trace(tmp_path), "device-waits"):
        assert row["cost_ns"] == 990_000  # what lies before the first kernel is unknown
        assert row["step_cost_ns"] is row["step_gain_ns"] is None and not row["step_pct"]


def test_work_that_was_launched_in_time(tmp_path: Path) -> None:
    trace = RankBuilder().op("aten::sum", 0, 20).kernel(1, 5, 10).kernel(3, 18, 10).trace(tmp_path)
    assert find_costs(trace, "device-waits") == [(4_000 + 3_000, 2, "aten::sum")]
    assert find_costs(trace, "launch-bound") == []
    (title,) = etloom.analyze(trace, "findings", pattern="device-waits", min_pct=0)["title"]
    assert title == "the device is idle 2 times in aten::sum although the next kernel is already launched"


def test_host_sync(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::sum", 0, 5).kernel(1, 5, 20)
    run.op("aten::item", 6, 22).op("cudaStreamSynchronize", 7, 20, "cuda_runtime", correlation=900)
    run.op("aten::mean", 30, 10).kernel(32, 36, 10)
    trace = run.trace(tmp_path)
    assert find_costs(trace, "host-sync") == [(11_000, 1, "aten::item")]
    assert find_costs(trace, "launch-bound") == []


def test_data_loading(tmp_path: Path) -> None:
    load = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    run = RankBuilder().op("aten::sum", 0, 5).kernel(1, 5, 20).op(load, 10, 70, "user_annotation")
    run.op("aten::mean", 82, 10).kernel(84, 90, 10)
    trace = run.trace(tmp_path)
    # The device runs to 25, the load to 80.
    assert [row[0] for row in find_costs(trace, "data-loading")] == [55_000]
    assert find_costs(trace, "launch-bound") == [(10_000, 1, "aten::mean")]


def test_checkpoints(tmp_path: Path) -> None:
    """Two steps that save for 300 us, of which kernels run for 40 us; saving within saving counts once."""
    run, idle = RankBuilder(), RankBuilder()
    for at in (0, 1_000):
        for case in (run, idle):
            case.step(at // 1_000, at, 900).op("aten::mm", at + 10, 50).kernel(at + 20, at + 30, 110)
        frame = "/usr/lib/python3/site-packages/torch/serialization.py(944): save"
        run.op("train.py(30): save_model", at + 100, 300, "python_function")
        run.op(frame, at + 100, 300, "python_function").op(frame, at + 110, 200, "python_function")
    (row,) = find_rows(run.trace(tmp_path), "checkpoints")
    assert (row["cost_ns"], row["count"], row["frame"]) == (520_000, 2, "train.py(30): save_model")
    assert row["title"] == "nothing else runs while the host saves 2 checkpoints"
    assert find_costs(idle.trace(tmp_path), "checkpoints") == []


def test_allocator(tmp_path: Path) -> None:
    def step(run: RankBuilder, at: float, number: int, allocates: bool) -> None:
        run.op(f"ProfilerStep#{number}", at, 100, "user_annotation").op("aten::empty", at + 1, 50)
        if allocates:
            run.op("cudaMalloc", at + 2, 40, "cuda_runtime")
        run.op("aten::sum", at + 60, 10).kernel(at + 61, at + 70, 20)

    run = RankBuilder()
    step(run, 0, 1, True)
    step(run, 100, 2, True)
    assert find_costs(run.trace(tmp_path), "allocator") == [(40_000, 1, "aten::empty")]
    warm = RankBuilder()
    step(warm, 0, 1, True)
    step(warm, 100, 2, False)
    assert find_costs(warm.trace(tmp_path), "allocator") == []


@pytest.mark.slow
def test_an_allocation_without_step_annotations(tmp_path: Path) -> None:
    """What comes before a tenth of the launches is warm-up."""

    def trace(at: int) -> Trace:
        run = RankBuilder()
        for launch in range(20):
            run.op("aten::sum", 100 * launch, 80).kernel(100 * launch + 50, 100 * launch + 60, 20)
        return run.op("cudaMalloc", at, 40, "cuda_runtime").trace(tmp_path)

    assert find_costs(trace(101), "allocator") == []
    assert find_costs(trace(1_001), "allocator") == [(40_000, 1, "aten::sum")]
    (row,) = etloom.analyze(trace(1_001), "findings", pattern="allocator", min_pct=0).iter_rows(named=True)
    assert row["confidence"] == "low" and "may be warm-up" in row["title"]


@pytest.mark.slow
def test_exposed_communication_and_unused_overlap(tmp_path: Path) -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    alone = RankBuilder().op("aten::mm", 0, 5).kernel(1, 5, 20).kernel(2, 25, 30, nccl).trace(tmp_path)
    assert [row[0] for row in find_costs(alone, "exposed-communication")] == [30_000]
    assert [row[0] for row in find_costs(alone, "unused-overlap")] == [30_000]
    # Computation of another stream hides 10 us of it, and cuts it in two.
    cut = (
        RankBuilder()
        .op("aten::mm", 0, 5)
        .kernel(1, 5, 20)
        .kernel(2, 25, 30, nccl)
        .kernel(3, 35, 10, stream=8)
    )
    trace = cut.trace(tmp_path)
    assert [row[:2] for row in find_costs(trace, "exposed-communication")] == [(20_000, 1)]
    assert [row[:2] for row in find_costs(trace, "unused-overlap")] == [(20_000, 1)]
    beside = (
        RankBuilder().op("aten::mm", 0, 5).kernel(1, 5, 40).kernel(2, 10, 30, nccl, stream=20).trace(tmp_path)
    )
    assert find_costs(beside, "exposed-communication") == find_costs(beside, "unused-overlap") == []


@pytest.mark.parametrize(
    ("elements", "count", "cost"), [(1000, 10, 45_000), (10**6, 10, None), (1000, 4, None)]
)
def test_small_collectives(tmp_path: Path, elements: int, count: int, cost: int | None) -> None:
    run = RankBuilder().op("aten::mm", 0, 5).kernel(1, 5, 20)
    for at in range(count):
        run.all_reduce(10 + at, 30 + 10 * at, 5, at, elements)
    rows = find_costs(run.trace(tmp_path), "small-collectives")
    assert rows == ([] if cost is None else [(cost, count, None)])


@pytest.mark.slow
def test_host_copies(tmp_path: Path) -> None:
    run = (
        RankBuilder()
        .op("aten::copy_", 0, 30)
        .kernel(1, 5, 10, "Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", call_us=20)
    )
    assert find_costs(run.trace(tmp_path), "copies") == [(20_000, 1, "aten::copy_")]
    pinned = "Memcpy HtoD (Pinned -> Device)"
    one = RankBuilder().op("aten::copy_", 0, 30).kernel(1, 5, 10, pinned, "gpu_memcpy", bytes=1 << 20)
    assert find_costs(one.trace(tmp_path), "copies") == [(10_000, 1, "aten::copy_")]  # exposed, but one
    many = RankBuilder().op("aten::copy_", 0, 100)
    for at in range(20):
        many.kernel(1 + 2 * at, 10 + 3 * at, 2, pinned, "gpu_memcpy", bytes=256)
    assert find_costs(many.trace(tmp_path), "copies") == [(40_000, 20, "aten::copy_")]


def test_copy_that_blocks_the_host_behind_kernels(tmp_path: Path) -> None:
    """The call waits from 10 to 112, for a kernel until 100: what it takes after that can be saved."""
    copy = "Memcpy HtoD (Pageable -> Device)"
    run = RankBuilder().op("aten::mm", 0, 5).kernel(1, 5, 95).op("aten::copy_", 9, 105)
    run.kernel(10, 100, 10, copy, "gpu_memcpy", call_us=102)
    assert find_costs(run.trace(tmp_path), "copies") == [(12_000, 1, "aten::copy_")]


def test_exposed_copies(tmp_path: Path) -> None:
    """Copies on two streams, from 10 to 25 and from 15 to 30, and a kernel to 15: lost at one time is lost once."""
    copy = "Memcpy HtoD (Pinned -> Device)"
    run = (
        RankBuilder()
        .op("aten::copy_", 0, 30)
        .kernel(1, 5, 10)
        .kernel(3, 10, 15, copy, "gpu_memcpy", stream=8)
    )
    run.kernel(5, 15, 15, copy, "gpu_memcpy", stream=9)
    assert find_costs(run.trace(tmp_path), "copies") == [(15_000, 2, "aten::copy_")]
    hidden = (
        RankBuilder()
        .op("aten::copy_", 0, 30)
        .kernel(1, 5, 30)
        .kernel(3, 10, 20, copy, "gpu_memcpy", stream=8)
    )
    assert find_costs(hidden.trace(tmp_path), "copies") == []
    pageable = (
        RankBuilder()
        .op("aten::copy_", 0, 30)
        .kernel(1, 5, 10, "Memcpy HtoD (Pageable -> Device)", "gpu_memcpy")
    )
    assert find_costs(pageable.trace(tmp_path), "copies") == [(10_000, 1, "aten::copy_")]


@pytest.mark.slow
def test_a_run_of_only_memcpy_is_reported(data: Path) -> None:
    job = open_run(data / "nsys/h100_2gpu_1s.sqlite.gz")
    first = etloom.analyze(job, "findings").row(0, named=True)
    assert (first["pattern"], first["ranks"]) == ("copies", 2) and first["pct"] > 90


def test_idle_devices(tmp_path: Path) -> None:
    """Device 0 works from 0 to 100, device 1 from 0 to 10 and from 90 to 100; device 2 for no more than a moment."""
    run = RankBuilder().step(0, 50, 100).op("aten::mm", 0, 40).kernel(1, 0, 100)
    run.kernel(3, 0, 10, device=1).kernel(5, 90, 10, device=1).kernel(7, 20, 1, device=2)
    rows = etloom.analyze(run.trace(tmp_path), "findings", pattern="idle-devices", min_pct=0)
    (row,) = rows.iter_rows(named=True)
    assert (
        row["title"]
        == "device 1, one of 2 of the rank, is busy for only 20 % of the time in which any of them is"
    )
    # In the step, from 50 on, 50 us and 10.
    assert (row["cost_ns"], row["step_pct"], row["operator"]) == (40_000, 20.0, None)
    alone = (
        RankBuilder()
        .op("aten::mm", 0, 40)
        .kernel(1, 0, 100)
        .kernel(3, 10, 50, stream=8)
        .kernel(7, 20, 1, device=2)
    )
    assert find_costs(alone.trace(tmp_path), "idle-devices") == []
    evenly = RankBuilder().op("aten::mm", 0, 40).kernel(1, 0, 100).kernel(3, 0, 100, device=1)
    assert find_costs(evenly.trace(tmp_path), "idle-devices") == []


def test_elementwise_chains(tmp_path: Path) -> None:
    run = RankBuilder().op("aten::add", 0, 30)
    for at in range(4):
        run.kernel(
            1 + at,
            5 + 10 * at,
            10,
            ELEMENTWISE.replace("elementwise", f"{'vectorized_' * (at == 2)}elementwise"),
        )
    assert find_costs(run.trace(tmp_path), "elementwise-chains") == [(30_000, 1, "aten::add")]
    equal = RankBuilder().op("aten::add", 0, 30)
    for at in range(4):
        equal.kernel(1 + at, 5 + 10 * at, 10, ELEMENTWISE)
    assert find_costs(equal.trace(tmp_path), "elementwise-chains") == [], "they may work on separate tensors"
    broken = RankBuilder().op("aten::add", 0, 30)
    for at, name in enumerate((ELEMENTWISE, ELEMENTWISE, KERNEL, ELEMENTWISE)):
        broken.kernel(1 + at, 5 + 10 * at, 10, name)
    assert find_costs(broken.trace(tmp_path), "elementwise-chains") == []


@pytest.mark.slow
def test_conversions(tmp_path: Path) -> None:
    copy = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda()>()"
    run = (
        RankBuilder().op("aten::copy_", 0, 10).kernel(1, 5, 10, copy).op("aten::mm", 12, 5).kernel(13, 20, 10)
    )
    assert find_costs(run.trace(tmp_path), "copies") == [(10_000, 1, "aten::copy_")]
    assert find_costs(RankBuilder().op("aten::mm", 0, 10).kernel(1, 5, 10).trace(tmp_path), "copies") == []
    host = RankBuilder().op("aten::to", 0, 20).op("aten::_to_copy", 1, 18).op("aten::copy_", 2, 10)
    assert find_costs(host.trace(tmp_path), "copies") == [(10_000, 1, "aten::to")]
    # A scalar has no layout, and an aten::to that copies nothing costs nothing.
    scalar = RankBuilder().op("aten::to", 0, 20).op("aten::_to_copy", 1, 18)
    scalar.op("aten::copy_", 2, 10, **{"Input Dims": [[], [], []]})
    assert find_costs(scalar.trace(tmp_path), "copies") == []
    assert (
        find_costs(RankBuilder().op("aten::pow", 0, 30).op("aten::to", 1, 20).trace(tmp_path), "copies") == []
    )
    # What a copy_ of its own is for, the host's events do not say.
    assert find_costs(RankBuilder().op("aten::copy_", 0, 10).trace(tmp_path), "copies") == []


@pytest.mark.parametrize(
    ("name", "major", "cost"),
    [
        ("ampere_sgemm_128x64_tn", 8, 5_000),
        ("ampere_sgemm_128x64_tn", 6, None),
        ("ampere_bf16_s16816gemm_bf16_128x64", 8, None),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n", 8, None),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256_s6_et64x16", 10, None),
    ],
)
def test_fp32_gemm(tmp_path: Path, name: str, major: int, cost: int | None) -> None:
    run = RankBuilder().op("aten::mm", 0, 10).kernel(1, 5, 10, name)
    rows = find_costs(run.trace(tmp_path, deviceProperties=[{"id": 0, "computeMajor": major}]), "fp32-gemm")
    assert rows == ([] if cost is None else [(cost, 1, "aten::mm")])


def test_recompilation_and_graph_breaks(tmp_path: Path) -> None:
    def trace(steady: bool) -> Trace:
        run = (
            RankBuilder()
            .op("ProfilerStep#1", 0, 100, "user_annotation")
            .op("ProfilerStep#2", 100, 100, "user_annotation")
        )
        run.op("_compile.compile_inner (dynamo_timed)", 10 if steady else 110, 50, "user_annotation")
        run.op("compile_fx.<locals>.x (dynamo_timed)", 20 if steady else 120, 10, "user_annotation")
        run.op("Torch-Compiled Region: 0/0", 170, 5)
        if not steady:
            run.op("Torch-Compiled Region: 1/0", 180, 5)
        return run.trace(tmp_path)

    assert [row[:2] for row in find_costs(trace(steady=False), "recompilation")] == [(50_000, 1), (5_000, 1)]
    assert find_costs(trace(steady=True), "recompilation") == []


@pytest.mark.slow
def test_zero_fill(tmp_path: Path) -> None:
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >()"
    run = (
        RankBuilder()
        .op("aten::zero_", 0, 10)
        .kernel(1, 5, 10, fill)
        .kernel(2, 15, 10, "Memset (Device)", "gpu_memset")
    )
    assert find_costs(run.trace(tmp_path), "zero-fill") == [(20_000, 2, "aten::zero_")]
    assert find_costs(RankBuilder().op("aten::mm", 0, 10).kernel(1, 5, 10).trace(tmp_path), "zero-fill") == []
    host = RankBuilder().op("aten::zero_", 0, 20).op("aten::fill_", 2, 10)
    assert find_costs(host.trace(tmp_path), "zero-fill") == []  # once is not over and over
    host.op("aten::zero_", 30, 20).op("aten::fill_", 32, 10)
    assert find_costs(host.trace(tmp_path), "zero-fill") == [(40_000, 2, "aten::zero_")]


@pytest.mark.parametrize(("value", "cost"), [("0.", 20_000), ("0", 20_000), ("1.", None), ("0.5", None)])
def test_only_zeros_are_zero_fill(tmp_path: Path, value: str, cost: int | None) -> None:
    """What fill_ fills with is in its arguments; a memset inside a library's call is that call's own."""
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >()"
    host, device = RankBuilder(), RankBuilder()
    for at in (0, 100):
        host.op("aten::fill_", at, 10, **{"Concrete Inputs": ["", value]})
        device.op("aten::fill_", at, 10, **{"Concrete Inputs": ["", value]}).kernel(at + 1, at + 5, 10, fill)
        device.op("aten::mm", at + 20, 10).kernel(at + 21, at + 25, 10, "Memset (Device)", "gpu_memset")
    for run in (host, device):
        rows = find_costs(run.trace(tmp_path), "zero-fill")
        assert rows == ([] if cost is None else [(cost, 2, "aten::fill_")])


@pytest.mark.parametrize(
    ("slow", "often", "cost"),
    [(4_000, 10, 4 * 3_900_000), (4_000, 20, 2 * 3_900_000), (4_000, 40, None), (290, 10, None)],
)
def test_oversubscription(tmp_path: Path, slow: int, often: int, cost: int | None) -> None:
    """Of 40 calls of 100 us, some stand still for 3.9 ms more; one is an exception, and 190 us are none."""
    run, at = RankBuilder(), 0
    for call in range(40):
        took = slow if call % often == often - 1 else 100
        run.op("aten::mm", at, took, **{"Input Dims": [[64, 64], [64, 64]]})
        at += took + 5
    rows = find_costs(run.trace(tmp_path), "oversubscription")
    assert [row[0] for row in rows] == ([] if cost is None else [cost])


@pytest.mark.parametrize(("name", "cost"), [("aten::linear", 4 * 3_900_000), ("Reducer", None)])
def test_operators_that_call_others_are_interrupted_outside_of_them(
    tmp_path: Path, name: str, cost: int | None
) -> None:
    """Some calls stand still before their product; what code other than an operator does then may be its work."""
    run, at = RankBuilder(), 0
    for call in range(40):
        pause = 3_900 if call % 10 == 9 else 0
        run.op(name, at, 120 + pause).op("aten::mm", at + 10 + pause, 100)
        at += 130 + pause
    rows = find_costs(run.trace(tmp_path), "oversubscription")
    assert [row[0] for row in rows] == ([] if cost is None else [cost])


def test_first_calls_are_not_interrupted(tmp_path: Path) -> None:
    """They load a library or choose an algorithm, on a machine of their own too."""
    run, at = RankBuilder(), 0
    for call in range(40):
        for name in ("aten::mm", "aten::convolution", "aten::relu"):
            took = 100 if call else 4_000
            run.op(name, at, took)
            at += took + 5
    assert find_costs(run.trace(tmp_path), "oversubscription") == []


@pytest.mark.slow
def test_stragglers(data: Path) -> None:
    """The lateness is that behind the median rank, not behind the last but one as in the analysis stragglers."""
    rows = etloom.analyze(open_run(data / "dlrm"), "findings", pattern="stragglers")
    delays = etloom.analyze(open_run(data / "dlrm"), "stragglers")
    assert set(rows["rank"].to_list()) == set(delays["rank"].head(1).to_list()) == {2}
    assert rows["cost_ns"].sum() > delays["delay_ns"][0] == 2_249_000


@pytest.mark.slow
def test_time_for_which_several_wait_is_lost_once(data: Path) -> None:
    """Ranks of a pipeline post many receives before they wait for the first."""
    job = open_run(data / "cpu/pp_4")
    rows = etloom.analyze(job, "findings", pattern="stragglers", min_pct=0)
    delays = dict(etloom.analyze(job, "stragglers").select("rank", "delay_ns").iter_rows())
    costs = dict(rows.select("rank", "cost_ns").iter_rows())
    worst = rows["rank"][0]
    assert costs[worst] == rows["cost_ns"].max() < 0.8 * delays[worst]
    assert rows["pct"].max() < 60


def two_ranks(folder: Path, late_us: float) -> Job:
    """Rank 1 comes so much later to the second of four all-reduces."""
    sizes = {"In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
    facts = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": 2, **sizes}
    for rank in range(2):
        run = RankBuilder()
        for number in range(4):
            late = late_us if number == 1 else 0
            start = 500 * number + 100 + rank * late
            run.op("aten::mm", start - 20, 5)
            took = 50 + (1 - rank) * late
            run.kernel(
                start - 19, start, took, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", Seq=number, **facts
            )
        run.trace(folder, distributedInfo={"backend": "nccl", "rank": rank, "world_size": 2})
        (folder / "kineto_trace_0.json").rename(folder / f"rank{rank}_trace.json")
    return etloom.open(folder)


@pytest.mark.slow
def test_a_rank_without_a_device_launches_nothing(data: Path) -> None:
    rows = etloom.analyze(open_run(data / "cpu/ddp_2"), "findings", pattern="stragglers")
    assert rows["title"].to_list() == ["rank 1 delays other ranks 2 times: longer compute"]
    assert rows["advice"][0].startswith(
        "compare the rank with the others: its share of the data, its host's load;"
    )


@pytest.mark.slow
def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    rows = etloom.analyze(two_ranks(tmp_path, 300), "findings", pattern="stragglers", min_pct=0)
    (row,) = rows.iter_rows(named=True)
    assert (row["rank"], row["cost_ns"], row["count"], row["confidence"]) == (1, 300_000, 1, "medium")
    assert row["title"] == "rank 1 delays other ranks once: its host launches late"


@pytest.mark.slow
def test_waiting_is_distinguished_from_transfer(tmp_path: Path) -> None:
    """Of the four all-reduces of 50 us rank 0 stands in the second for 300 more, which rank 1 is awaited."""
    rows = etloom.analyze(two_ranks(tmp_path, 300), "findings", pattern="exposed-communication", min_pct=0)
    assert rows.select("rank", "ranks", "cost_ns", "count").rows() == [(0, 2, 200_000, 4)]
    assert rows["title"][0].endswith(" (without the time until late ranks arrive, which is in stragglers)")
    # Of one rank alone nobody knows: all of it is one.
    alone = Job({0: two_ranks(tmp_path, 300)[0]})
    rows = etloom.analyze(alone, "findings", pattern="exposed-communication", min_pct=0)
    assert rows["cost_ns"].to_list() == [500_000] and "late ranks" not in rows["title"][0]


def test_a_delay_within_the_error_of_the_clocks_is_none(tmp_path: Path) -> None:
    """1 us, of clocks whose communications end together: to the 2 us of a file in whole ones."""
    job = two_ranks(tmp_path, 1)
    assert etloom.analyze(job, "clocks")["residual_ns"].to_list() == [0, 2_000]
    assert etloom.analyze(job, "findings", pattern="stragglers", min_pct=0).is_empty()


def test_the_other_end_of_a_message_is_not_a_straggler(data: Path) -> None:
    """A pipeline waits for its messages: said with less confidence, and with other advice."""
    rows = etloom.analyze(open_run(data / "cpu/pp_4"), "findings", pattern="stragglers", min_pct=0)
    assert set(rows["confidence"]) == {"low"} and rows["advice"].str.contains("micro-batches").all()
    rows = etloom.analyze(open_run(data / "cpu/ddp_2"), "findings", pattern="stragglers", min_pct=0)
    assert set(rows["confidence"]) == {"medium"} and rows["step"].to_list() == [0]


def test_a_busy_machine_is_a_finding(data: Path) -> None:
    """Four ranks on few cores; a single process that had them to itself."""
    rows = etloom.analyze(open_run(data / "cpu/pp_4"), "findings", pattern="oversubscription")
    assert rows["ranks"].to_list() == [4] and rows["cost_ns"].item() > 80_000_000
    alone = data / "hta_misc/distributed_info_not_found.json.gz"
    assert etloom.analyze(etloom.open(alone), "findings", pattern="oversubscription", min_pct=0).is_empty()


def test_percent_of_marked_steps(tmp_path: Path) -> None:
    """The gap of 40 us in the step of 100 us, not that of 100 us before it."""
    run = RankBuilder().op("aten::sum", 0, 20).kernel(1, 5, 10).op("aten::mean", 100, 20).kernel(115, 115, 10)
    run.op("ProfilerStep#1", 200, 100, "user_annotation").op("aten::sum", 200, 20).kernel(201, 205, 45)
    run.op("aten::mean", 260, 35).kernel(289, 290, 10)
    (row,) = find_rows(run.trace(tmp_path), "launch-bound")
    # Also the gap between the two, from 125 to 205, and the one of 5 us to the first launch of the step.
    assert (row["cost_ns"], row["count"], row["operator"]) == (220_000, 3, "aten::mean")
    assert row["pct"] == pytest.approx(100 * 220 / 300)
    assert row["step_pct"] == pytest.approx(45)
    assert row["step_cost_ns"] == 45_000
    assert json.loads(row["parts"]) == [
        {"place": "aten::mean", "cost_ns": 140_000, "count": 2},
        {"place": "aten::sum", "cost_ns": 80_000, "count": 1},
    ]


def test_only_events_within_a_step_count_for_steps(tmp_path: Path) -> None:
    """A gap of 500 us ends 50 us into a step of 100 us; the kernel launched last runs on for 60 us after it."""
    run = RankBuilder().op("aten::sum", 0, 20).kernel(1, 5, 45)
    run.op("ProfilerStep#1", 500, 100, "user_annotation").op("aten::mean", 500, 60).kernel(548, 550, 10)
    run.op("aten::contiguous", 580, 20).kernel(581, 590, 70, name="direct_copy_kernel")
    rows = etloom.analyze(run.trace(tmp_path), "findings", min_pct=0)
    told = rows.filter(pl.col("pattern").is_in(["launch-bound", "copies"]))
    assert told.select("pattern", "operator", "cost_ns", "step_pct").rows() == [
        ("launch-bound", "aten::mean", 500_000 + 30_000, 50 + 30),
        ("copies", "aten::contiguous", 70_000, 10),
    ]


def test_time_that_two_streams_lose_at_once_counts_once(tmp_path: Path) -> None:
    """Copies from 10 to 50 and from 30 to 70, a step until 50."""
    run = RankBuilder().op("ProfilerStep#1", 0, 50, "user_annotation").op("aten::contiguous", 0, 9)
    run.kernel(1, 10, 40, name="direct_copy_kernel").kernel(3, 30, 40, name="direct_copy_kernel", stream=8)
    rows = etloom.analyze(run.trace(tmp_path), "findings", pattern="copies", min_pct=0)
    assert rows.select("cost_ns", "count", "pct", "step_pct").rows() == [(60_000, 2, 100 * 60 / 70, 80.0)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30), st.floats(0, 1)), min_size=1),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=3),
)
def test_no_cost_is_more_than_the_time_it_is_of(
    rows: list[tuple[int, int, float]], steps: list[tuple[int, int]]
) -> None:
    """Against a reckoning tick by tick: whatever overlaps, and wherever the steps are."""
    view = RankView(Trace())
    view.__dict__["step_intervals"] = Intervals.of([at for at, _ in steps], [at + took for at, took in steps])
    costs = [int(took * share) for _, took, share in rows]
    frame = pl.DataFrame(
        {"start": [at for at, _, _ in rows], "end": [at + took for at, took, _ in rows], "cost_ns": costs}
    )
    ticks = {tick for at, took, _ in rows for tick in range(at, at + took)}
    marked = {tick for at, took in steps for tick in range(at, at + took)}
    spread_out = sum(
        one / took
        for one, (at, took, _) in zip(costs, rows, strict=True)
        for tick in range(at, at + took)
        if tick in marked
    )
    total, in_steps = compute_cost(view, frame)
    assert total == min(sum(costs), len(ticks))
    assert in_steps == pytest.approx(min(spread_out, len(ticks & marked)), abs=0.51)
    assert in_steps <= min(len(marked), total + 1)


def test_few_ranks_are_looked_at_at_a_time() -> None:
    """What is worked out of a rank is let go when so many others were looked at since."""
    job = Job({rank: Trace({}, {"rank": rank}) for rank in range(12)})
    views = JobView(job)
    seen = {rank: weakref.ref(views[rank]) for rank in range(8)}
    assert [views[rank] is seen[rank]() for rank in range(8)] == [True] * 8
    for rank in (0, 8, 9):
        views[rank]
    assert [rank for rank in range(8) if seen[rank]() is None] == [1, 2]
    assert list(views._cache) == [3, 4, 5, 6, 7, 0, 8, 9]


def test_a_place_is_the_operator_that_the_program_called(tmp_path: Path) -> None:
    """Not the operators that it is made of; where there is nothing else, the outermost of them."""
    run = RankBuilder().op("aten::item", 0, 40).op("aten::_local_scalar_dense", 1, 30)
    run.op("aten::zeros", 50, 40).op("aten::zero_", 51, 30).op("aten::fill_", 52, 20)
    run.op("aten::to", 100, 40).op("aten::_to_copy", 101, 30).op("aten::copy_", 102, 20)
    view = RankView(etloom.link(run.trace(tmp_path)))
    names = dict(view.trace.events.select(pl.col("name").cast(pl.String), "id").iter_rows())
    inner = pl.Series([names[name] for name in ("aten::_local_scalar_dense", "aten::fill_", "aten::copy_")])
    assert view.locate(inner)["operator"].to_list() == ["aten::item", "aten::zeros", "aten::to"]


def test_counts_are_written_in_words(tmp_path: Path) -> None:
    def title(gaps: int) -> str:
        run = RankBuilder().op("aten::mm", 0, 100)
        for at in range(gaps + 1):
            run.kernel(10 * at + 8, 10 * at + 10, 4)
        return etloom.analyze(run.trace(tmp_path), "findings", pattern="launch-bound")["title"].item()

    assert title(1) == "host-bound: the device waits for the host to launch in aten::mm, 1 gap"
    assert title(3) == "host-bound: the device waits for the host to launch in aten::mm, 3 gaps"


def test_long_waits_for_a_launch_may_be_warm_up(tmp_path: Path) -> None:
    """10 s in one gap and 2 of 5 us: no CUDA graph helps, whether nothing marks a step or the first comes later."""

    def told(*steps: tuple[float, float], pattern: str = "launch-bound") -> tuple[str, str]:
        run = RankBuilder().op("aten::mm", 0, 12_000_000)
        for start, end in steps:
            run.op(f"ProfilerStep#{start}", start, end - start, "user_annotation")
        for at in (0, 10, 10_000_000, 10_000_010):
            run.kernel(at + 8, at + 10, 5)
        return etloom.analyze(run.trace(tmp_path), "findings", pattern=pattern)["title", "advice"].row(0)

    said = "host-bound: the device waits for the host to launch in aten::mm, 3 gaps, most of it in 1 gap of 10,000 ms"
    title, advice = told()
    assert title == f"{said} (no step is annotated: may be warm-up)"
    assert advice.startswith("warm up before the trace") and "CUDA graph" not in advice
    title, advice = told((10_000_000, 10_000_020), (10_000_020, 10_000_040))
    # The gap at the end of the last step is in no operator that launches.
    before = said.replace(" in aten::mm, 3 gaps", ", 4 gaps")
    assert title == f"{before} (before the first annotated step: may be warm-up)"
    assert advice.startswith("warm up before the trace")
    title, advice = told((0, 5), (6, 10_000_040))
    assert title == said.replace(" in aten::mm, 3 gaps", ", 5 gaps")
    assert advice.startswith("check on the timeline") and "for the others capture" in advice


def test_advice_is_not_repeated_within_a_pattern(tmp_path: Path) -> None:
    row = dict.fromkeys(findings.COLUMNS) | {"rank": 0, "ranks": 1, "cost_ns": 5, "count": 1, "advice": "ask"}
    rows = [row | {"pattern": pattern, "title": "t"} for pattern in ("a", "a", "b")]
    text = format_findings(pl.DataFrame(rows, schema=findings.COLUMNS), False)
    assert (text.count("-> ask"), text.count("-> as a above")) == (2, 1)


@pytest.mark.parametrize(
    ("step_cost_ns", "unit"), [(2_000_000, "over the whole recording, not per step"), (None, "in total")]
)
def test_costs_by_place_state_their_unit(step_cost_ns: int | None, unit: str) -> None:
    parts = [{"place": place, "cost_ns": 3_000_000, "count": 2} for place in ("Attention", "MLP")]
    row = dict.fromkeys(findings.COLUMNS) | {
        "rank": 0,
        "ranks": 1,
        "cost_ns": 6_000_000,
        "count": 4,
        "pattern": "a",
    }
    row |= {"title": "t", "advice": "ask", "step_cost_ns": step_cost_ns, "parts": json.dumps(parts)}
    text = " ".join(format_findings(pl.DataFrame([row], schema=findings.COLUMNS), False).split())
    assert f"by place, {unit}: Attention 3.000 ms (2 times); MLP 3.000 ms (2 times)" in text


@pytest.mark.slow
def test_the_place_of_a_finding(data: Path) -> None:
    rows = etloom.analyze(open_run(data / "tracelens/h100_qwen.json.gz"), "findings")
    (row,) = rows.filter(pattern="elementwise-chains").iter_rows(named=True)
    assert row["module"].startswith("Qwen2Attention")
    assert "Qwen2RMSNorm" in [part["place"] for part in json.loads(row["parts"])]
    assert re.search(r"modeling_qwen2\.py\(\d+\): ", row["frame"])


@pytest.mark.slow
def test_costs_are_within_the_run_and_ranked_by_gain(data: Path) -> None:
    for name in ("dlrm", "cpu/ddp_2", "tracelens/mi300_qwen.json.gz"):
        rows = etloom.analyze(open_run(data / name), "findings", min_pct=0)
        ordered = rows.filter(
            ~pl.col("title").str.contains("recording begins later|the recording does not show")
        )
        assert ordered["job_gain_ns"].is_sorted(descending=True)
        assert rows["pct"].is_between(0, 100).all() and ordered["job_gain_pct"].is_between(0, 100).all()


@pytest.mark.slow
def test_without_a_graph_that_explains_the_recording_costs_rank(data: Path) -> None:
    rows = etloom.analyze(open_run(data / "hta_misc/negative_queue_a100.json.gz"), "findings", min_pct=0)
    assert rows["job_gain_ns"].null_count() == rows.height
    assert rows.filter(pl.col("pattern") != "unrecorded-time")["cost_ns"].is_sorted(descending=True)


def test_every_pattern_is_tried_here() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_findings*.py"))
    assert [name for name in registry.list_plugins("patterns") if f'"{name}"' not in text] == []


@pytest.mark.slow
def test_lines_of_findings_fit_a_page(tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    small_traces.write_run(tmp_path / "run")
    status, out, err = call("analyze", "findings", tmp_path / "run", "--no-cache")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    rows = etloom.analyze(etloom.open(tmp_path / "run", use_cache=False), "findings")
    *paragraphs, bases = [" ".join(text.split()) for text in out.split("\n\n")]
    assert bases == PERCENT_BASES
    assert len(paragraphs) == rows.height > 0
    advised: dict[str, str] = {}
    for text, row in zip(paragraphs, rows.iter_rows(named=True), strict=True):
        again = advised.get(row["pattern"]) == row["advice"]
        advised[row["pattern"]] = row["advice"]
        advice = f"as {row['pattern']} above" if again else row["advice"]
        assert f"{row['title']} -> {advice} lost on " in text
        assert f": {row['pattern']} ({row['confidence']} confidence)" in text
    assert json.loads(call("analyze", "findings", tmp_path / "run", "--format", "json")[1]) == rows.to_dicts()
    status, out, err = call("analyze", "findings", tmp_path / "run", "--min-pct", "100", "--no-cache")
    assert (status, out) == (0, "") and f"all {len(registry.list_plugins('patterns'))} patterns, or" in err


def test_a_name_steers_no_terminal_and_a_rank_is_named_once() -> None:
    row = dict.fromkeys(findings.COLUMNS) | {
        "pattern": "stragglers",
        "rank": 1,
        "ranks": 3,
        "cost_ns": 1_500_000,
    }
    row |= {
        "confidence": "low",
        "title": "\x1b[2Jlate",
        "advice": "wait",
        "count": 1,
        "name": "rank 1",
        "step": 4,
    }
    told, _, _ = format_findings(pl.DataFrame([row], schema=findings.COLUMNS), False).partition(
        "\nPercent of"
    )
    assert told == (
        "1.500 ms in total, 0.0 % of rank 1: stragglers (low confidence)\n  \\x1b[2Jlate\n  -> wait\n"
        "  caused by 3 ranks, of which rank 1: 1.500 ms in total, 0.0 % of its recording; 1 time; step 4\n"
    )


def test_a_table_with_some_columns_of_findings_is_a_table() -> None:
    row: dict[str, object] = dict.fromkeys(findings.COLUMNS)
    assert is_findings_table(pl.DataFrame([row | {"more": 1}]))
    assert not is_findings_table(pl.DataFrame([row]).drop("ranks"))


def test_the_sum_of_findings_lists_each_place_once() -> None:
    """Both findings list five of seven places and sum the others; they share the first place."""

    def build(name: str, cost_ns: int) -> Finding:
        parts = [Part("shared", cost_ns, 1), *(Part(f"{name} {at}", cost_ns - 1 - at, 1) for at in range(4))]
        lost = Intervals([cost_ns], [2 * cost_ns])
        return Finding(name, cost_ns, "high", "", lost, "host", parts=(*parts, Part("2 more", 5, 4, more=2)))

    parts = sum_findings([build("a", 100), build("b", 50)], "both").parts
    assert [part.place for part in parts] == ["shared", "a 0", "a 1", "a 2", "a 3", "8 more"]
    assert len(parts) == MAX_PLACES + 1
    assert parts[0] == Part("shared", 150, 2)
    assert parts[-1] == Part("8 more", 49 + 48 + 47 + 46 + 10, 12, more=8)


@pytest.mark.slow
@pytest.mark.parametrize("analysis", ["findings", "critical-path", "slack", "graph-quality"])
@pytest.mark.parametrize("run", ["nccl_ddp", "dlrm"])
def test_two_threads_give_the_same_answer_as_one(
    data: Path, monkeypatch: pytest.MonkeyPatch, run: str, analysis: str
) -> None:
    by_one = etloom.analyze(etloom.open(data / run), analysis)
    monkeypatch.setattr(machine, "MIN_PARALLEL_ROWS", 0)
    assert etloom.analyze(etloom.open(data / run), analysis).equals(by_one)
