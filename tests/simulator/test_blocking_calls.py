"""Copies and launches that block the host: predictions with known answers, and the quality of a graph without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.simulator import parse_change
from etloom.simulator import simulate as simulate_with

KERNELS, KERNEL_US = 20, 500


def host(
    name: str, start: float, end: float, correlation: int | None = None, cat: str = "cuda_runtime"
) -> dict[str, Any]:
    """Times in us."""
    return {"cat": cat, "name": name, "ts": round(1000 * start), "dur": round(1000 * (end - start))} | {
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "correlation": correlation,
    }


def device(name: str, start: float, end: float, correlation: int, stream: int = 7) -> dict[str, Any]:
    cat = "gpu_memcpy" if "emcpy" in name or "Copy" in name else "kernel"
    return host(name, start, end, correlation, cat) | {"pid": 0, "tid": stream, "device": 0, "stream": stream}


def link(events: list[dict[str, Any]]) -> Trace:
    order = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    rows = [{"id": i, "position": i, **event} for i, event in enumerate(order)]
    return etloom.link(Trace({"events": pl.DataFrame(rows, infer_schema_length=None)}, {"rank": 0}))


def kernels_then_copy(
    call: str, copy: str, copy_us: float = 10, returned_us: float = 15, stream: int = 7
) -> list[dict[str, Any]]:
    """Kernels back to back, and a copy behind them; its call begins at once, and returns ``returned_us`` after the
    copy has ended."""
    events = []
    for i in range(KERNELS):
        events += [
            host("cudaLaunchKernel", 10 * i, 10 * i + 5, i + 1),
            device("gemm", 10 + KERNEL_US * i, 10 + KERNEL_US * (i + 1) - 1, i + 1),
        ]
    done = 10 + KERNEL_US * KERNELS
    events += [
        host(call, 10 * KERNELS, done + copy_us + returned_us, 99),
        device(copy, done, done + copy_us, 99, stream),
        host("aten::next", done + copy_us + returned_us, done + copy_us + returned_us + 100, cat="cpu_op"),
    ]
    return events


def change_pct(trace: Trace, text: str) -> float:
    """Return the predicted change of the makespan, upper bound, in percent."""
    simulated = simulate_with(Job({0: trace}), [parse_change(text)])
    return float(simulated.table["upper_bound_change_pct"][0])


BLOCKING = {
    "to pageable memory": ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", 10, 15),
    "to pageable memory, slow to unpack": ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", 10, 300),
    "nsys, driver": ("cuMemcpyDtoHAsync_v2", "Memcpy Device-to-Host (Device -> Pageable)", 10, 15),
    "synchronous": ("cudaMemcpy", "Memcpy DtoH (Device -> Pinned)", 10, 15),
    "synchronous, nsys": ("cudaMemcpy_v3020", "Memcpy DtoH (Device -> Pinned)", 10, 15),
    "driver": ("cuMemcpyDtoH_v2", "Memcpy DtoH (Device -> Pinned)", 10, 15),
    "from pageable memory, staged": ("cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)", 300, -90),
    "ROCm": ("hipMemcpyWithStream", "Memcpy DtoH (Device -> Host)", 10, 15),
    "ROCm, clocks 1 us apart": ("hipMemcpyWithStream", "Memcpy DtoH (Device -> Host)", 10, -1),
    "ROCm, clocks 8 us apart": ("hipMemcpyWithStream", "CopyDeviceToHost", 10, -8),
    "ROCm, clocks 8 us apart, short copy": ("hipMemcpyWithStream", "Memcpy DtoH (Device -> Host)", 1, -8),
    "ROCm, times alone": ("hipMemcpyAsync", "Memcpy DtoH (Device -> Host)", 10, 15),
    "ROCm, times alone, clocks 8 us apart": ("hipMemcpyAsync", "Memcpy DtoH (Device -> Host)", 10, -8),
    "MUSA": ("musaMemcpy", "Memcpy DtoH (Device -> Pinned)", 10, 15),
    "NPU": ("AscendCL@aclrtMemcpy", "Memcpy DtoH", 10, 15),
    "XPU, times alone": ("urEnqueueUSMMemcpy", "Memcpy D2H", 10, 5),
}


@pytest.mark.parametrize("case", BLOCKING)
@pytest.mark.slow
def test_a_blocking_copy_waits_for_the_kernels_before_it(case: str) -> None:
    call, copy, copy_us, returned_us = BLOCKING[case]
    events = kernels_then_copy(call, copy, copy_us, returned_us)
    trace = link(events)
    total = KERNELS * KERNEL_US + 10 + copy_us + returned_us + 100
    assert change_pct(trace, "kernel x0.5") == pytest.approx(-50 * KERNELS * KERNEL_US / total, abs=0.5)
    # Without kernels, the launches, the copy, its unpacking and the rest of the host remain.
    remaining = 10 * KERNELS + max(copy_us + returned_us, 0) + 100
    assert change_pct(trace, "kernel x0") == pytest.approx(100 * remaining / total - 100, abs=1.5)
    assert change_pct(trace, "kernel x1") == 0
    path = etloom.analyze(Job({0: trace}), "critical-path")
    assert path.filter(pl.col("kind") == "kernel")["pct"].sum() > 90
    quality = etloom.analyze(Job({0: trace}), "graph-quality")
    assert quality["explainable"].all() and quality["unexplained_wait_ns"].sum() == 0


def test_a_synchronous_copy_on_the_default_stream_waits_for_other_streams() -> None:
    trace = link(kernels_then_copy("cudaMemcpy", "Memcpy DtoH (Device -> Pinned)", stream=0))
    assert change_pct(trace, "kernel x0.5") == pytest.approx(-49.4, abs=0.5)


def test_a_copy_behind_another_stream_waits_for_it() -> None:
    """The tracer recorded cudaStreamWaitEvent as a call only, and no event record (as in dlrm)."""
    events = kernels_then_copy("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", stream=20)
    begun = 10 * KERNELS
    trace = link([*events, host("cudaStreamWaitEvent", begun - 4, begun - 2)])
    assert change_pct(trace, "kernel x0.5") == pytest.approx(-49.4, abs=0.5)


@pytest.mark.parametrize(
    ("call", "copy"),
    [
        ("cudaMemcpyAsync", "Memcpy HtoD (Pinned -> Device)"),
        ("cudaMemcpyAsync", "Memcpy DtoD (Device -> Device)"),
        ("cudaMemcpyAsync", "Memcpy HtoD (Pageable -> Device)"),
        ("hipMemcpyAsync", "Memcpy DtoH (Device -> Host)"),
    ],
)
def test_a_call_that_returns_before_the_kernels_end_did_not_wait(call: str, copy: str) -> None:
    returned = 10 * KERNELS + 8
    trace = link(kernels_then_copy(call, copy, returned_us=returned - (10 + KERNEL_US * KERNELS + 10)))
    assert trace.sync_dependencies.is_empty()


@pytest.mark.parametrize("copy", ["Memcpy DtoH (Device -> Pinned)", "Memcpy DtoD (Device -> Device)"])
def test_an_asynchronous_copy_that_ends_within_its_call_is_not_a_wait(copy: str) -> None:
    trace = link([host("cudaMemcpyAsync", 0, 60, 1), device(copy, 20, 22, 1)])
    assert trace.sync_dependencies.is_empty()


@pytest.mark.parametrize("blocking", [True, False])
def test_launches_that_block(blocking: bool) -> None:
    """As with CUDA_LAUNCH_BLOCKING=1."""
    events = []
    for i in range(10):
        at = 1000 * i
        events += [
            host("cudaLaunchKernel", at, at + (910 if blocking else 5), i + 1),
            device("gemm", at + 5, at + 905, i + 1),
        ]
    trace = link([*events, host("aten::last", 10_000, 10_100, cat="cpu_op")])
    saved = -100 * 10 * 450 / 10_100 if blocking else 0
    assert change_pct(trace, "kernel x0.5") == pytest.approx(saved, abs=0.5)


def test_a_graph_without_the_waits_is_reported() -> None:
    trace = link(kernels_then_copy("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)"))
    job = Job({0: trace.replace(sync_dependencies=trace.sync_dependencies.clear())})
    quality = etloom.analyze(job, "graph-quality")
    assert not quality["explainable"].any()
    assert quality["reason"][0] == "calls that wait for the GPU count as host work for 97 % of the makespan"
    with pytest.raises(AnalysisError, match="no prediction: the graph does not explain the recording"):
        simulate_with(job, [parse_change("kernel x0.5")])


def test_the_case_with_a_known_answer(data: Path) -> None:
    simulated = etloom.simulate(data / "cases" / "block.json", "kernel:* x0.5")
    assert simulated.table["upper_bound_change_pct"][0] == pytest.approx(-49.9, abs=0.05)


SAVED = {
    "hta_misc/negative_queue_a100.json.gz": (-8.0, -16.0),
    "resnet_mismatch/kineto_trace_0.json.gz": (-6.2, -8.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_recordings_with_blocking_copies(name: str, data: Path) -> None:
    job = etloom.open(data / name, use_cache=False)
    linked = Job({rank: etloom.link(trace) for rank, trace in job.items()})
    graph = build_graph(linked)
    for text, saved in zip(("kernel x0.5", "kernel x0"), SAVED[name], strict=True):
        simulated = simulate_with(linked, [parse_change(text)], graph)
        assert simulated.table["upper_bound_change_pct"][0] == pytest.approx(saved, abs=0.1)
