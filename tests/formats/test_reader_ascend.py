"""Ascend's trace_view.json: kernels, calls and collectives by the names of processes and of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.trace import Trace

PYTHON, CANN, HARDWARE, HCCL, OVERLAP = 10, 20, 30, 40, 50
NAMES = {
    PYTHON: "Python",
    CANN: "CANN",
    HARDWARE: "Ascend Hardware",
    HCCL: "Communication",
    OVERLAP: "Overlap Analysis",
}
START = 1_700_000_000_000_000


def event(
    name: str, pid: int, tid: int, ts: float, dur: float, cat: str | None = None, **args: Any
) -> dict[str, Any]:
    row = {
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": f"{START + ts:.3f}",
        "dur": dur,
        "ph": "X",
        "args": args,
    }
    return row if cat is None else {**row, "cat": cat}


def write(folder: Path) -> Path:
    """Two kernels, a wait, a copy, and a collective with a task of its own."""
    task: dict[str, Any] = {"Model Id": 4294967295, "Stream Id": 3}
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "pid": pid, "ph": "M", "args": {"name": name}} for pid, name in NAMES.items()
    ]
    rows.append({"name": "process_labels", "pid": HARDWARE, "ph": "M", "args": {"labels": "NPU 2"}})
    rows += [
        event("ProfilerStep#4", PYTHON, 1, 0, 1000, "user_annotation"),
        event("aten::mm", PYTHON, 1, 10, 50, "cpu_op"),
        event("Node@launch", CANN, 1, 20, 5, connection_id=7),
        event("Node@launch", CANN, 1, 120, 5, connection_id=8),
        event("Hccl@launch", CANN, 1, 150, 5, connection_id=9),
        event("MatMulV2", HARDWARE, 3, 40, 100, **task, **{"Task Type": "AI_CORE", "connection_id": 7}),
        event("Cast", HARDWARE, 3, 140, 30, **task, **{"Task Type": "MIX_AIV", "connection_id": 8}),
        event("EVENT_WAIT", HARDWARE, 3, 170, 60, **task, **{"Task Type": "EVENT_WAIT"}),
        event("MEMCPY_ASYNC", HARDWARE, 3, 230, 10, **task, **{"Task Type": "MEMCPY_ASYNC"}),
        event("hcom_allReduce__503_0_1", HCCL, 2, 160, 70, connection_id=9, count=1024, data_type="FP32"),
        event("Notify_Wait", HCCL, 3, 161, 20, **{"task type": "Notify Wait"}),
        event("Computing", OVERLAP, 0, 40, 130),
    ]
    path = folder / "trace_view.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return etloom.open(write(tmp_path_factory.mktemp("ascend")), use_cache=False)[0]


def test_work_of_the_device(trace: Trace) -> None:
    table = etloom.analyze(trace, "kernel-breakdown")
    rows = {name: (kind, total) for kind, name, total in table.select("kind", "name", "total_ns").iter_rows()}
    assert rows == {
        "MatMulV2": ("computation", 100_000),
        "hcom_allReduce__503_0_1": ("communication", 70_000),
        "Cast": ("computation", 30_000),
        "MEMCPY_ASYNC": ("memory", 10_000),
    }
    work = trace.events.filter(pl.col("cat").cast(pl.String) == "kernel")
    assert set(work["device"]) == {2}  # also of communication, whose process has no number
    assert trace.events["ts"].min() == START * 1000
    assert dict(trace.stats.select("name", "count").iter_rows())["read.ascend_tasks"] == 1


def test_work_has_its_launch_and_step(trace: Trace) -> None:
    names = trace.events.select("id", pl.col("name").cast(pl.String), "step")
    joined = trace.launches.join(names, left_on="device_event", right_on="id").join(
        names, left_on="launch", right_on="id", suffix="_launch"
    )
    assert dict(joined.select("name", "name_launch").iter_rows()) == {
        "MatMulV2": "Node@launch", "Cast": "Node@launch", "hcom_allReduce__503_0_1": "Hccl@launch"
    }  # fmt: skip
    assert set(joined["step"]) == {4}


def test_collectives_have_size_and_group(trace: Trace) -> None:
    row = etloom.analyze(etloom.Job({0: trace}), "collectives").row(0, named=True)
    assert (row["collective"], row["group"], row["bytes"], row["duration_ns"]) == (
        "all_reduce",
        "503",
        4096,
        70_000,
    )
