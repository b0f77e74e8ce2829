"""What-if on made graphs whose answers follow from arithmetic, and laws that hold for any change."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.graphs import MinimumLatencies, build_graph
from etloom.simulator import parse_change
from etloom.simulator import simulate as simulate_with

LAUNCH, STREAM, SYNC, CALL = 4_000, 1_000, 2_000, 5_000
LATENCIES = MinimumLatencies(submission=LAUNCH, launch=LAUNCH, stream=STREAM, sync=SYNC)

Work = tuple[int, int, int]
"""Host time before a launch, kernel time, stream (0 or 1); ns."""


def make_events(works: list[Work], sync: str) -> list[dict[str, Any]]:
    """One thread that launches kernels on two streams, each kernel of stream 1 after the last one of stream 0.

    At the end it waits: not at all, with a device synchronization, or with a copy to pageable memory.
    """
    events: list[dict[str, Any]] = []
    now, free, last = 0, [0, 0], 0

    def emit(cat: str, name: str, start: int, end: int, stream: int | None, correlation: int | None) -> None:
        place = (
            {"pid": 1, "tid": 1}
            if stream is None
            else {"pid": 0, "device": 0, "stream": stream, "tid": stream}
        )
        event = {
            "cat": cat,
            "name": name,
            "ts": start,
            "dur": end - start,
            "ph": "X",
            "correlation": correlation,
        }
        events.append(event | place)

    def launch(cat: str, call: str, name: str, lasts: int, stream: int) -> int:
        nonlocal now
        called, correlation = now, len(events) + 1
        start = max(now + CALL + LAUNCH, free[stream] + STREAM if free[stream] else 0)
        if stream == 1 and free[0]:
            start = max(start, free[0] + STREAM)
        free[stream] = start + lasts
        if cat == "gpu_memcpy":
            now = max(now + CALL, free[stream] + SYNC)
        else:
            now += CALL
        emit("cuda_runtime", call, called, now, None, correlation)
        emit(cat, name, start, start + lasts, stream, correlation)
        return free[stream]

    for before, lasts, stream in works:
        begun = now
        now += before
        if stream == 1:
            emit("cuda_runtime", "cudaEventRecord", now, now + CALL, None, len(events) + 1)
            now += CALL
            emit("cuda_runtime", "cudaStreamWaitEvent", now, now + CALL, None, len(events) + 1)
            now += CALL
        last = max(last, launch("kernel", "cudaLaunchKernel", "gemm", lasts, stream))
        emit("cpu_op", "aten::mm", begun, now, None, None)
    if sync == "device":
        end = max(now + 2_000, last + SYNC)
        emit("cuda_runtime", "cudaDeviceSynchronize", now, end, None, len(events) + 1)
        now = end
    elif sync == "copy":
        launch("gpu_memcpy", "cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", 3_000, 0)
    emit("cpu_op", "aten::last", now, now + 50_000, None, None)
    return events


def make_trace(works: list[Work], sync: str) -> Trace:
    events = sorted(make_events(works, sync), key=lambda event: (event["ts"], -event["dur"]))
    rows = [{"id": i, "position": i, **event} for i, event in enumerate(events)]
    return etloom.link(
        Trace({"events": pl.DataFrame(rows, infer_schema_length=None)}, {"rank": 0, "clock": "relative"})
    )


def predict(trace: Trace, text: str) -> tuple[int, int, int]:
    """Return the recorded makespan, and its upper and lower bound."""
    job = Job({0: trace})
    graph = build_graph(job, LATENCIES)
    simulated = simulate_with(job, [parse_change(text)], graph)
    return graph.makespan(), graph.makespan(simulated.upper_bound), graph.makespan(simulated.lower_bound)


def span(works: list[Work], sync: str) -> int:
    events = make_events(works, sync)
    return max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)


works = st.lists(
    st.tuples(st.integers(0, 200_000), st.integers(2_000, 400_000), st.integers(0, 1)),
    min_size=2,
    max_size=12,
)
syncs = st.sampled_from(["none", "device", "copy"])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(works, syncs)
def test_other_kernel_and_host_times_are_predicted(run: list[Work], sync: str) -> None:
    """Against the same program run again with these times. A call submits between 0 and CALL after its begin."""
    trace = make_trace(run, sync)
    for text, changed in (
        ("kernel x0.5", [(before, lasts // 2, stream) for before, lasts, stream in run]),
        ("kernel x0", [(before, 0, stream) for before, _, stream in run]),
        ("op:aten::mm x1", run),
    ):
        recorded, upper, lower = predict(trace, text)
        assert recorded == span(run, sync) and lower <= upper
        assert upper == pytest.approx(span(changed, sync), abs=CALL + LAUNCH + SYNC + 2_000)


CHANGES = ["kernel", "copy", "host", "python", "op:aten::mm", "launch", "stream", "sync"]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(works, syncs)
def test_x1_changes_nothing_and_less_is_never_slower(run: list[Work], sync: str) -> None:
    job = Job({0: make_trace(run, sync)})
    graph = build_graph(job)

    def makespan(text: str) -> int:
        simulated = simulate_with(job, [parse_change(text)], graph)
        assert (simulated.lower_bound <= simulated.upper_bound).all() or "x2" in text
        return graph.makespan(simulated.upper_bound)

    for target in CHANGES:
        try:
            unchanged = simulate_with(job, [parse_change(f"{target} x1")], graph)
        except EtloomError:
            continue  # nothing of this kind in the run
        assert np.array_equal(unchanged.upper_bound, unchanged.recorded)
        assert np.array_equal(unchanged.lower_bound, unchanged.recorded)
        makespans = [makespan(f"{target} {factor}") for factor in ("x0", "x0.5", "x1", "x2")]
        assert makespans == sorted(makespans)


@pytest.mark.parametrize("sync", ["none", "device", "copy"])
def test_kernels_of_a_host_bound_run_are_free(sync: str) -> None:
    trace = make_trace([(500_000, 20_000, i % 2) for i in range(10)], sync)
    recorded, upper, _ = predict(trace, "kernel x0")
    assert recorded - upper < 25_000
    recorded, upper, _ = predict(trace, "host x0.5")
    assert recorded / 2 <= upper < 0.52 * recorded


@pytest.mark.parametrize("sync", ["device", "copy"])
def test_the_host_of_a_device_bound_run_is_free(sync: str) -> None:
    trace = make_trace([(10_000, 500_000, i % 2) for i in range(10)], sync)
    recorded, upper, _ = predict(trace, "op:aten::mm x0.5")
    assert recorded - upper < 15_000
    recorded, upper, _ = predict(trace, "kernel x0")
    assert upper < 0.1 * recorded
