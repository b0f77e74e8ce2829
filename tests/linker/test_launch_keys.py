"""The ids by which GPU activity finds its launch and operator, as profilers of several vendors write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.trace import Trace
from etloom.linker import link


def event(
    cat: str, name: str, ts: int, dur: int = 2, pid: int = 1, tid: int = 1, **args: Any
) -> dict[str, Any]:
    args = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def linked(tmp_path: Path, *rows: dict[str, Any]) -> Trace:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    return link(trace)


def launches(trace: Trace) -> list[tuple[str, str | None, str | None]]:
    """Names of activity, call and operator, in order of time."""
    names: dict[int | None, str | None] = dict(trace.events.select("id", "name").rows())
    rows = trace.launches.sort("device_event").select("device_event", "launch", "operator").rows()
    return [(names[device] or "", names.get(call), names.get(operator)) for device, call, operator in rows]


ROCM = [
    event("cpu_op", "mm", 0, 40, External_id=513),
    event("cuda_runtime", "hipLaunch", 5, External_id=25),
    event("cuda_runtime", "hipMemcpy", 15, External_id=26),
    event("kernel", "k", 30, pid=2, External_id=25),
    event("gpu_memcpy", "copy", 50, pid=2, External_id=26),
]


@pytest.mark.parametrize("correlation", [None, 0, -1])
@pytest.mark.parametrize("key", ["External id", "external id"])
def test_activity_without_a_correlation_has_the_external_id_of_its_call(
    tmp_path: Path, key: str, correlation: int | None
) -> None:
    rows = json.loads(json.dumps(ROCM).replace("External id", key))
    for row in rows:
        if correlation is not None:
            row["args"]["correlation"] = correlation
    assert launches(linked(tmp_path, *rows)) == [("k", "hipLaunch", "mm"), ("copy", "hipMemcpy", "mm")]


def test_each_activity_of_a_mixed_file_has_a_unique_key(tmp_path: Path) -> None:
    rows = [
        *ROCM,
        event("cuda_runtime", "cudaLaunch", 20, correlation=900, External_id=900),
        event("kernel", "late", 60, pid=2, correlation=900, External_id=25),
        event("kernel", "lost", 70, pid=2, correlation=901, External_id=900),
    ]
    assert launches(linked(tmp_path, *rows))[2:] == [("late", "cudaLaunch", "mm"), ("lost", None, None)]


def test_calls_of_one_correlation_are_distinguished_by_external_ids(tmp_path: Path) -> None:
    rows = [
        event("cpu_op", "a", 0, 10, External_id=1),
        event("cuda_runtime", "first", 2, correlation=7, External_id=31),
        event("cpu_op", "b", 20, 10, External_id=2),
        event("cuda_runtime", "second", 22, correlation=7, External_id=32),
        event("kernel", "k1", 40, pid=2, correlation=7, External_id=31),
        event("kernel", "k2", 50, pid=2, correlation=7, External_id=32),
        event("kernel", "k3", 60, pid=2, correlation=7),
    ]
    assert launches(linked(tmp_path, *rows)) == [
        ("k1", "first", "a"),
        ("k2", "second", "b"),
        ("k3", "second", "b"),
    ]


def test_external_ids_name_the_operator_if_the_call_is_missing(tmp_path: Path) -> None:
    """Several calls of an operator share its id then: the call stays unknown, the operator does not."""
    rows = [
        event("cpu_op", "a", 0, 10, External_id=1),
        event("cuda_runtime", "first", 2, correlation=7, External_id=1),
        event("cuda_runtime", "second", 5, correlation=8, External_id=1),
        event("kernel", "k1", 40, pid=2, correlation=7, External_id=1),
        event("kernel", "k2", 50, pid=2, correlation=6, External_id=1),
    ]
    assert launches(linked(tmp_path, *rows)) == [("k1", "first", "a"), ("k2", None, "a")]


def test_external_ids_that_repeat_the_correlation_name_no_operator(tmp_path: Path) -> None:
    rows = [
        event("cpu_op", "a", 0, 10, External_id=7),
        event("cpu_op", "b", 20, 10, External_id=8),
        event("cuda_runtime", "call", 22, correlation=7, External_id=7),
        event("kernel", "k1", 40, pid=2, correlation=7, External_id=7),
        event("kernel", "k2", 50, pid=2, correlation=8, External_id=8),
    ]
    assert launches(linked(tmp_path, *rows)) == [("k1", "call", "b"), ("k2", None, None)]


def test_host_events_with_the_pid_of_the_device_make_it_no_process(tmp_path: Path) -> None:
    """As MTIA, HPU and NPU recorders write them; with two processes that number their own calls, pids count."""
    host = [event("mtia_runtime", f"run {at}", at, correlation=at + 7, pid=865) for at in range(3)]
    other = event("mtia_runtime", "other", 5, correlation=1000, pid=17)
    work = [event("mtia_ccp_events", f"k{at}", 20 + at, 1, correlation=at + 7, pid=17) for at in range(3)]
    assert launches(linked(tmp_path, *host, other, *work)) == [
        (f"k{at}", f"run {at}", None) for at in range(3)
    ]

    two = [event("cuda_runtime", f"call {pid}", pid, correlation=7, pid=pid) for pid in (1, 2)]
    kernels = [event("kernel", f"k{pid}", 40 + pid, correlation=7, pid=pid, tid=9) for pid in (1, 2)]
    assert launches(linked(tmp_path, *two, *kernels)) == [("k1", "call 1", None), ("k2", "call 2", None)]


def test_an_annotation_is_not_the_operator_of_a_launch(tmp_path: Path) -> None:
    rows = [
        event("user_annotation", "ProfilerStep#3", 0, 100),
        event("user_annotation", "forward", 1, 90),
        event("cuda_runtime", "call", 22, correlation=7),
        event("kernel", "k", 40, pid=2, correlation=7),
        event("cpu_op", "op", 50, 20),
        event("user_annotation", "inside", 52, 10),
        event("cuda_runtime", "call 2", 54, correlation=8),
        event("kernel", "k2", 60, pid=2, correlation=8),
    ]
    trace = linked(tmp_path, *rows)
    assert launches(trace) == [("k", "call", None), ("k2", "call 2", "op")]
    assert dict(trace.stats.select("name", "count").rows())["link.launch_without_operator"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cross", [("k", "cudaLaunchKernel", "op")]),
        ("rocm", [("Cijk_A", "hipExtModuleLaunchKernel", "aten::mm")]),
        ("mtia", [("event_record", "recordEvent", None)]),
        ("tie", []),
    ],
)
def test_small_cases_with_known_answers(data: Path, name: str, expected: list[Any]) -> None:
    path = data / "cases" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    trace = etloom.read(path)
    assert isinstance(trace, Trace)
    trace = link(trace)
    assert launches(trace) == expected
    if name == "tie":
        assert trace.events["parent"].null_count() == 2


@pytest.mark.parametrize("where", [{}, {"device": 0}])
def test_a_recorded_synchronization_without_a_device_waits_for_device_0(
    tmp_path: Path, where: dict[str, int]
) -> None:
    rows = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 5, correlation=1),
        event("kernel", "k", 10, 60, correlation=1, **where),
        event("cuda_runtime", "cudaDeviceSynchronize", 6, 66, correlation=2),
        event("cuda_sync", "Context Synchronize", 8, 62, correlation=2, cuda_sync_kind="Context Sync"),
    ]
    rows[3]["args"]["cuda_sync_kind"] = rows[3]["args"].pop("cuda sync kind")
    for row in rows:
        del row["pid"], row["tid"]
    waits = linked(tmp_path, *rows).table("sync_dependencies")
    assert waits.select("kind", "how").rows() == [("Context Sync", "recorded")]


def _draw_arrow(
    number: int, start: tuple[int, int, int], end: tuple[int, int, int], cat: str = "ac2g"
) -> list[dict[str, Any]]:
    """Return both ends of an arrow between two (pid, tid, ts)."""
    return [
        {"ph": phase, "cat": cat, "name": cat, "id": number, "pid": pid, "tid": tid, "ts": ts}
        for phase, (pid, tid, ts) in (("s", start), ("f", end))
    ]


WITHOUT_IDS = [
    event("cpu_op", "mm", 0, 20),
    event("cuda_runtime", "launch", 5),
    event("cuda_runtime", "cudaStreamSynchronize", 12, 30),
    event("kernel", "early", 1, 3, pid=2, device=0, stream=7),
    event("kernel", "gemm", 30, 10, pid=2, device=0, stream=7),
    event("cpu_op", "add", 60, 20),
    event("kernel", "add_kernel", 90, 5, pid=2, device=0, stream=7),
]


def test_arrows_lead_from_calls_and_operators_to_activity_without_ids(tmp_path: Path) -> None:
    trace = linked(
        tmp_path,
        *WITHOUT_IDS,
        *_draw_arrow(1, (1, 1, 6), (2, 1, 30)),
        *_draw_arrow(2, (1, 1, 13), (2, 1, 39)),  # of the synchronization, which launches nothing
        *_draw_arrow(3, (1, 1, 65), (2, 1, 90), "async_npu"),
        *_draw_arrow(1, (1, 1, 13), (2, 1, 90), "fwdbwd")[:1],
    )
    assert launches(trace) == [("early", None, None), ("gemm", "launch", "mm"), ("add_kernel", None, "add")]
    assert dict(trace.stats.select("name", "count").iter_rows())["link.launches_by_arrow"] == 1


def test_arrows_with_a_repeated_id_start_at_the_last_call_before(tmp_path: Path) -> None:
    rows = [
        row
        for begin in (0, 100)
        for row in (
            event("cuda_runtime", f"launch{begin}", begin),
            event("kernel", f"k{begin}", begin + 50, pid=2, device=0, stream=7),
            *_draw_arrow(9, (1, 1, begin), (2, 1, begin + 50)),
        )
    ]
    assert launches(linked(tmp_path, *rows)) == [("k0", "launch0", None), ("k100", "launch100", None)]


def _two_kernels_and_a_copy(stream: int, copies: int = 1) -> list[dict[str, Any]]:
    device = {"pid": 2, "device": 0}
    return [
        event("cpu_op", "mm", 0, 20),
        event("cuda_runtime", "cudaLaunchKernel", 5),
        event("cuda_runtime", "cudaMemcpyAsync", 30),
        event("cuda_runtime", "cudaLaunchKernel", 40),
        event("kernel", "first", 25, **device, stream=7),
        *(event("gpu_memcpy", "copy", 50 + 2 * number, **device, stream=7) for number in range(copies)),
        event("kernel", "second", 60, **device, stream=stream),
    ]


def test_activity_without_ids_and_arrows_is_paired_in_order(tmp_path: Path) -> None:
    assert launches(linked(tmp_path, *_two_kernels_and_a_copy(7))) == [
        ("first", "cudaLaunchKernel", "mm"), ("copy", "cudaMemcpyAsync", None), ("second", "cudaLaunchKernel", None)
    ]  # fmt: skip


def test_no_order_is_assumed_between_streams_and_for_other_numbers_of_calls(tmp_path: Path) -> None:
    calls = [call for _, call, _ in launches(linked(tmp_path, *_two_kernels_and_a_copy(8, copies=2)))]
    assert calls == [None] * 4
