"""Causes that a comparison of steps or streams shows: hidden launches, warm-up, additional work, repeated operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.small_traces import RankBuilder, find_costs, find_rows


def build_communication(launch_us: int, call: str = "") -> RankBuilder:
    """A kernel of 10 us, an all-reduce from 20 to 220 us, and a kernel launched meanwhile, 5 us before it starts."""
    run = RankBuilder().op("aten::mm", 0, 10).kernel(1, 5, 10)
    run.op("c10d::allreduce_", 11, 6).all_reduce(12, 16, 204, 1)
    run.events[-1]["args"]["stream"] = run.events[-1]["tid"] = 20
    if call:
        run.op(call, 20, launch_us - 25, "cuda_runtime")
    run.op("aten::mm", launch_us - 1, 10).kernel(launch_us, launch_us + 5, 200)
    return run


def test_computation_launched_late_during_communication_is_host_bound(tmp_path: Path) -> None:
    """The device communicates from 16 us on; the launch at 100 us is late by 84 us."""
    (late,) = find_rows(build_communication(100).trace(tmp_path), "launch-bound")
    assert late["cost_ns"] == pytest.approx(85_000, abs=2_000)
    assert "host-bound" in late["title"]


def test_computation_that_waits_for_communication_is_not_host_bound(tmp_path: Path) -> None:
    """The second kernel starts when the all-reduce has ended."""
    run = build_communication(216)
    assert sum(row["cost_ns"] for row in find_rows(run.trace(tmp_path), "launch-bound")) < 5_000


def test_a_host_that_waits_for_the_device_during_communication_is_not_late(tmp_path: Path) -> None:
    run = build_communication(100, "cudaDeviceSynchronize")
    assert sum(row["cost_ns"] for row in find_rows(run.trace(tmp_path), "launch-bound")) < 15_000


def build_steps(works: list[int], extra: int = 0, at_step: int = 1) -> RankBuilder:
    """Steps whose host works for so many us before each of 12 launches of kernels of 20 us; one has more kernels."""
    run, at = RankBuilder(), 0
    for number, work in enumerate(works):
        count = 12 + (extra if number == at_step else 0)
        run.step(number, at, count * work)
        for i in range(count):
            name = "gemm" if i < 12 else "evaluate"
            start = at + i * work
            run.op(f"aten::{name}", start, work - 1).kernel(start + work - 3, start + work, 20, name)
        at += count * work
    return run


@pytest.mark.parametrize(
    ("works", "warm_up"), [([100, 50, 50, 50], True), ([50, 50, 50, 50], False), ([50, 50, 100, 50], False)]
)
def test_a_slower_first_step_is_warm_up(tmp_path: Path, works: list[int], warm_up: bool) -> None:
    """The host works 600 us longer in the first step."""
    trace = build_steps(works).trace(tmp_path)
    rows = find_rows(trace, "warm-up")
    assert [row["cost_ns"] for row in rows] == ([pytest.approx(600_000, rel=0.1)] if warm_up else [])
    (bound,) = find_rows(trace, "launch-bound")
    assert bound["cost_ns"] > 12 * 25_000 * 3


@pytest.mark.parametrize(("steps", "extra", "count"), [(3, 10, 10), (3, 7, 0), (2, 10, 0)])
def test_kernels_that_other_steps_do_not_run(tmp_path: Path, steps: int, extra: int, count: int) -> None:
    """Eight or more, in one of three or more steps."""
    rows = find_costs(build_steps([50] * steps, extra).trace(tmp_path), "additional-work")
    assert rows == ([(20_000 * count, count, "aten::evaluate")] if count else [])


def test_kernels_that_replace_others_are_not_additional(tmp_path: Path) -> None:
    """The second step runs as many kernels of the same duration under other names."""
    run = build_steps([50] * 3)
    for event in run.events:
        if event["cat"] == "kernel" and 600 <= event["ts"] < 1200:
            event["name"] = "another"
    assert find_costs(run.trace(tmp_path), "additional-work") == []


def build_additions(additions: list[int], name: str = "evaluate", optimizer: bool = False) -> RankBuilder:
    """Steps of 12 kernels of two names, and so many more; optionally in the step of an optimizer."""
    run, at = RankBuilder(), 0
    for number, more in enumerate(additions):
        run.step(number, at, 50 * (12 + more))
        if optimizer and more:
            run.op("Optimizer.step#Adam.step", at + 50 * 12, 50 * more, "user_annotation")
        for i in range(12 + more):
            kernel = ("forward", "backward")[i % 2] if i < 12 or not name else name
            run.op(f"aten::{kernel}", at + 50 * i, 49).kernel(at + 50 * i + 47, at + 50 * i + 50, 20, kernel)
        at += 50 * (12 + more)
    return run


@pytest.mark.parametrize(
    ("additions", "name", "optimizer", "count"),
    [
        ([0, 0, 0, 20, 0, 0, 0, 20], "adam", False, 0),  # gradient accumulation
        ([0, 0, 0, 20, 0], "adam", True, 0),  # of which one update is recorded
        ([0, 0, 0, 20, 0], "adam", False, 20),
        ([0, 20, 0, 0, 0, 20, 20, 0], "evaluate", False, 0),  # two kinds of steps, in any order
        ([0, 0, 0, 12, 0], "", False, 0),  # a step of more micro-batches
        ([0, 30, 10, 20, 40, 25, 5], "decode", False, 0),  # no usual length
    ],
)
def test_several_kinds_of_steps_are_not_additional_work(
    tmp_path: Path, additions: list[int], name: str, optimizer: bool, count: int
) -> None:
    rows = find_costs(build_additions(additions, name, optimizer).trace(tmp_path), "additional-work")
    assert [row[1] for row in rows] == ([count] if count else [])


def test_an_evaluation_is_reported_among_steps_of_two_kinds(tmp_path: Path) -> None:
    """Every fourth step updates the parameters; another one evaluates."""
    run, at = RankBuilder(), 0
    for number in range(12):
        names = ["forward"] * 12 + ["adam"] * (20 if number % 4 == 3 else 0)
        names += ["evaluate"] * (15 if number == 5 else 0)
        run.step(number, at, 50 * len(names))
        for i, name in enumerate(names):
            run.op(f"aten::{name}", at + 50 * i, 49).kernel(at + 50 * i + 47, at + 50 * i + 50, 20, name)
        at += 50 * len(names)
    (row,) = find_rows(run.trace(tmp_path), "additional-work")
    assert (row["count"], row["step"], row["operator"]) == (15, 5, "aten::evaluate")
    assert "in 1 step of 12" in row["title"]


def test_a_long_call_of_the_runtime_is_named(tmp_path: Path) -> None:
    """The device idles for 2 ms while a library of kernels is loaded."""
    run = RankBuilder().step(1, 0, 3_000).op("aten::mm", 0, 20).kernel(5, 10, 20)
    run.op("cuLibraryLoadData", 40, 2_000, "cuda_driver")
    run.op("aten::mm", 2_045, 20).kernel(2_050, 2_055, 100)
    (row,) = find_rows(run.trace(tmp_path), "slow-calls")
    assert row["cost_ns"] == pytest.approx(2_000_000, abs=10_000)
    assert row["name"] == "cuLibraryLoadData"
    assert sum(row["cost_ns"] for row in find_rows(run.trace(tmp_path), "launch-bound")) < 1_000_000


def test_operators_of_a_checkpoint_run_again(tmp_path: Path) -> None:
    run = (
        RankBuilder().op("aten::linear", 0, 10, **{"Sequence number": 1, "Fwd thread id": 0}).kernel(1, 5, 50)
    )
    run.op("CheckpointFunctionBackward", 100, 60, **{"Sequence number": 1, "Fwd thread id": 1})
    run.op("aten::linear", 105, 10, **{"Sequence number": 3, "Fwd thread id": 0}).kernel(106, 110, 50)
    run.op("AddmmBackward0", 120, 10, **{"Sequence number": 3, "Fwd thread id": 1}).kernel(121, 161, 70)
    (row,) = find_rows(run.trace(tmp_path), "recomputation")
    assert (row["cost_ns"], row["count"]) == (50_000, 1)
    assert "checkpointing" in row["title"]


def test_late_launches_after_a_checkpoint_are_due_to_it(tmp_path: Path) -> None:
    """The save takes 2 ms, 1.9 of which the device has work; the launches after it are late by 90 us each."""
    run = RankBuilder().step(1, 0, 5_000).op("aten::mm", 0, 20).kernel(5, 10, 1_920)
    run.op("torch/serialization.py(965): save", 30, 2_000, "python_function")
    for i in range(10):
        run.op("aten::mm", 2_040 + 100 * i, 20).kernel(2_045 + 100 * i, 2_050 + 100 * i, 10)
    (row,) = find_rows(run.trace(tmp_path), "checkpoints")
    assert row["cost_ns"] > 800_000
    assert sum(row["cost_ns"] for row in find_rows(run.trace(tmp_path), "launch-bound")) < 100_000


def test_an_operator_that_allocates_does_not_compute_on_the_host(tmp_path: Path) -> None:
    """The first tensor of a device takes long: its context is created."""
    run = RankBuilder().step(1, 0, 3_000).op("aten::mm", 0, 20).kernel(5, 10, 20)
    run.op("aten::empty", 40, 2_000).op("aten::mm", 2_045, 20).kernel(2_050, 2_055, 100)
    assert find_rows(run.trace(tmp_path), "host-compute") == []


def test_operators_of_a_gpu_job_without_kernels_are_not_interrupted(tmp_path: Path) -> None:
    run, at = RankBuilder(), 0
    for call in range(40):
        run.op("aten::mm", at, 4_000 if call % 10 == 0 else 100)
        at += 4_100
    assert len(find_rows(run.trace(tmp_path), "oversubscription")) == 1
    run.op("cudaDeviceSynchronize", at, 10, "cuda_runtime")
    assert find_rows(run.trace(tmp_path), "oversubscription") == []
