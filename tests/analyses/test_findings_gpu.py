"""Causes that recordings of a real GPU showed, each as a small trace; and the overhead of the recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.analyses.findings.job_gain import JobGains
from etloom.analyses.findings.rank_view import RankView
from etloom.core.trace import Job
from support.small_traces import KERNEL, RankBuilder, complete_event, find_rows

PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
H100 = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "computeMajor": 9, "computeMinor": 0}]
}


def test_an_operator_that_calls_others_computes_on_the_host(tmp_path: Path) -> None:
    """aten::sort on the CPU copies its input first."""
    run = RankBuilder().step(1, 0, 3_000).op("aten::mm", 0, 20).kernel(5, 10, 20)
    run.op("aten::sort", 100, 2_000).op("aten::copy_", 110, 60).op("aten::arange", 180, 30)
    run.op("aten::mm", 2_200, 20).kernel(2_205, 2_210, 100)
    trace = run.trace(tmp_path)
    (row,) = find_rows(trace, "host-compute")
    assert "mostly aten::sort" in row["title"] and row["cost_ns"] > 1_900_000
    operators = RankView(etloom.link(trace)).host_operators["name"].to_list()
    assert operators == ["aten::sort", "aten::copy_"]


def test_an_operator_that_launches_inside_does_not_compute_on_the_host(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 3_000).op("aten::mm", 0, 20).kernel(5, 10, 20)
    run.op("aten::linear", 100, 2_000).op("aten::addmm", 1_900, 60).kernel(1_905, 1_910, 100)
    assert find_rows(run.trace(tmp_path), "host-compute") == []


def test_copies_to_the_host_in_a_save_are_part_of_it(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 8_400).op("aten::mm", 0, 20).kernel(5, 10, 20)
    run.op("torch/serialization.py(945): save", 100, 8_000, "python_function")
    run.op("aten::copy_", 200, 5_100)
    run.kernel(210, 220, 5_000, "Memcpy DtoH (Device -> Pageable)", cat="gpu_memcpy", call_us=5_050)
    run.op("aten::mm", 8_200, 20).kernel(8_205, 8_210, 100)
    trace = run.trace(tmp_path)
    (row,) = find_rows(trace, "checkpoints")
    assert row["cost_ns"] == pytest.approx(8_000_000, rel=0.02)
    assert find_rows(trace, "copies") == []


def test_the_wait_of_a_small_pageable_copy_is_a_copy(tmp_path: Path) -> None:
    run = RankBuilder().step(1, 0, 5_000)
    for number in range(20):
        at = 200.0 * number
        run.op("aten::copy_", at, 100).kernel(at + 5, at + 20, 3, PAGEABLE, cat="gpu_memcpy")
        run.op("cudaStreamSynchronize", at + 10, 30, "cuda_runtime")
        run.op("aten::mm", at + 120, 20).kernel(at + 125, at + 130, 20)
    gaps = RankView(etloom.link(run.trace(tmp_path))).gaps
    causes = gaps["cause"].cast(str).value_counts().to_dict(as_series=False)
    counts = dict(zip(causes["cause"], causes["count"], strict=True))
    assert counts.get("copy", 0) >= 19 and "sync" not in counts


@pytest.mark.parametrize(
    ("kernel", "share"),
    [
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4",
            0.73,
        ),
        ("cutlass_80_simt_sgemm_128x256_8x4_nt_align1", 0.73),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage3_warpsize2x2x1_tensor16x8x8", None),
    ],
)
def test_fp32_products_save_what_the_peaks_allow(tmp_path: Path, kernel: str, share: float | None) -> None:
    run = RankBuilder().step(1, 0, 5_000).op("aten::mm", 0, 20).kernel(5, 10, 4_000, kernel)
    rows = find_rows(run.trace(tmp_path, **H100), "fp32-gemm")
    if share is None:
        assert rows == []
    else:
        assert rows[0]["cost_ns"] == pytest.approx(share * 4e6, rel=0.02)


def test_kernels_launched_before_the_recording_are_of_no_step(tmp_path: Path) -> None:
    """The device lags a step behind: what it runs first was launched in a step that was not recorded."""
    run = RankBuilder()
    for step in range(3):
        at = 1_000.0 * step
        run.step(step + 5, at, 990)
        for number in range(10):
            launch, device = at + 50 * number, 3_000 + at + 60 * number
            run.op("aten::mm", launch, 20).kernel(launch + 5, device, 50)
    for number in range(10):
        run.events.append(complete_event("kernel", KERNEL, 2_300 + 60 * number, 50, 0, 7, device=0, stream=7))
    activities = RankView(etloom.link(run.trace(tmp_path))).activities
    orphans = activities.filter(activities["launch"].is_null())
    assert len(orphans) == 10 and orphans["step"].null_count() == 10


def slow_down(job: Job, overhead: str, **facts: int) -> Job:
    """Return the job with a recorder that costs this much an event, and the facts of the steps before it."""
    slower = etloom.simulate(job, f"host +{overhead}").job
    return slower.replace(meta={"run": {"ranks": [{"unrecorded": facts}]}})


def measure_step_ns(job: Job) -> int:
    steps = etloom.simulate(job, "kernel x1").table.filter(scope="step")["before_ns"]
    return int(steps[-1])


@pytest.mark.parametrize("overhead", ["3us", "10us"])
def test_gains_are_those_without_the_recorder(overhead: str, own: Path) -> None:
    job = etloom.open(own / "gpu_small")
    duration = JobGains(job).duration_ns
    slower = slow_down(job, overhead, step_ns=measure_step_ns(job), steps=8)
    gains = JobGains(slower)
    assert duration is not None and gains.recorder is not None and gains.duration_ns is not None
    recorded = JobGains(slower.replace(meta={"run": {}})).duration_ns
    assert recorded is not None and recorded > 1.2 * duration
    assert gains.duration_ns == pytest.approx(duration, rel=0.1)


@pytest.mark.parametrize(
    "facts",
    [None, {}, {"step_ns": "1", "steps": 3}, {"step_ns": -1, "steps": 3}, {"step_ns": 10**9, "steps": 8}],
)
def test_without_a_shorter_step_before_nothing_is_taken_off(facts: Any, own: Path) -> None:
    job = etloom.open(own / "gpu_small").replace(meta={"run": {"ranks": [{"unrecorded": facts}]}})
    assert JobGains(job).recorder is None


def test_steps_that_something_else_lengthened_stay(own: Path) -> None:
    """A step of 1 us before the recording: no overhead of the host explains the kernels of this one."""
    job = etloom.open(own / "gpu_small").replace(
        meta={"run": {"ranks": [{"unrecorded": {"step_ns": 1_000, "steps": 8}}]}}
    )
    assert JobGains(job).recorder is None


def build_host_bound(steps: list[float], *, lead_us: float = 0) -> RankBuilder:
    """Steps of a host that launches a kernel of 2 us each 20 us, one step after the other."""
    run, at = RankBuilder(), 10.0
    for number in range(int(lead_us // 20)):
        run.op("aten::mul", at + 20 * number, 18)
    at += lead_us
    for step, length in enumerate(steps):
        run.step(step, at, length - 1)
        for number in range(int(length // 20)):
            run.op("aten::mm", at + 20 * number + 1, 17).kernel(at + 20 * number + 5, at + 20 * number + 8, 2)
        at += length
    return run


def open_ranks(folder: Path, ranks: list[RankBuilder], device: str = "cpu", **facts: Any) -> Job:
    for rank, run in enumerate(ranks):
        run.trace(folder, distributedInfo={"backend": "gloo", "rank": rank, "world_size": len(ranks)})
        (folder / "kineto_trace_0.json").rename(folder / f"rank{rank}_trace.json")
    meta: Any = {"run": {"ranks": [{"device": device, "unrecorded": facts}]}}
    return etloom.open(folder, use_cache=False).replace(meta=meta)


@pytest.mark.parametrize(
    "ranks",
    [[[1_000] * 6, [1_000] * 3], [[1_000, 1_000, 1_000, 4_000, 1_000]], [[1_000] * 6, [1_000] * 6]],
    ids=["fewer steps on a rank", "a slow step", "equal"],
)
def test_steps_as_long_as_before_have_no_overhead(tmp_path: Path, ranks: list[list[float]]) -> None:
    job = open_ranks(tmp_path, [build_host_bound(steps) for steps in ranks], step_ns=1_000_000, steps=8)
    assert JobGains(job).recorder is None


def test_host_work_before_the_first_step_keeps_its_time(tmp_path: Path) -> None:
    job = open_ranks(tmp_path, [build_host_bound([1_000] * 3, lead_us=4_000)], step_ns=600_000, steps=8)
    gains = JobGains(job)
    assert gains.recorder is not None and gains.duration_ns is not None
    assert gains.duration_ns == pytest.approx(3 * 600_000, rel=0.1)


@pytest.mark.parametrize(("clock", "is_used"), [("device", True), ("host", False)])
def test_a_host_that_may_run_ahead_times_no_device(tmp_path: Path, clock: str, is_used: bool) -> None:
    run = build_host_bound([1_000] * 4)
    job = open_ranks(tmp_path, [run], device="cuda:0", step_ns=600_000, steps=8, clock=clock)
    assert (JobGains(job).recorder is not None) == is_used
