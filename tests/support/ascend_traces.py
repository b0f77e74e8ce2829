"""A trace of Ascend's profiler, as its trace_view.json states it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PYTHON, CANN, HARDWARE, HCCL, OVERLAP = 10, 20, 30, 40, 50
NAMES = {
    PYTHON: "Python",
    CANN: "CANN",
    HARDWARE: "Ascend Hardware",
    HCCL: "Communication",
    OVERLAP: "Overlap Analysis",
}
START = 1_700_000_000_000_000


def _event(
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


def write_trace_view(folder: Path) -> Path:
    """Two kernels, a wait, a copy, and a collective with a task of its own."""
    task: dict[str, Any] = {"Model Id": 4294967295, "Stream Id": 3}
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "pid": pid, "ph": "M", "args": {"name": name}} for pid, name in NAMES.items()
    ]
    rows.append({"name": "process_labels", "pid": HARDWARE, "ph": "M", "args": {"labels": "NPU 2"}})
    rows += [
        _event("ProfilerStep#4", PYTHON, 1, 0, 1000, "user_annotation"),
        _event("aten::mm", PYTHON, 1, 10, 50, "cpu_op"),
        _event("Node@launch", CANN, 1, 20, 5, connection_id=7),
        _event("Node@launch", CANN, 1, 120, 5, connection_id=8),
        _event("Hccl@launch", CANN, 1, 150, 5, connection_id=9),
        _event("MatMulV2", HARDWARE, 3, 40, 100, **task, **{"Task Type": "AI_CORE", "connection_id": 7}),
        _event("Cast", HARDWARE, 3, 140, 30, **task, **{"Task Type": "MIX_AIV", "connection_id": 8}),
        _event("EVENT_WAIT", HARDWARE, 3, 170, 60, **task, **{"Task Type": "EVENT_WAIT"}),
        _event("MEMCPY_ASYNC", HARDWARE, 3, 230, 10, **task, **{"Task Type": "MEMCPY_ASYNC"}),
        _event("hcom_allReduce__503_0_1", HCCL, 2, 160, 70, connection_id=9, count=1024, data_type="FP32"),
        _event("Notify_Wait", HCCL, 3, 161, 20, **{"task type": "Notify Wait"}),
        _event("Computing", OVERLAP, 0, 40, 130),
    ]
    path = folder / "trace_view.json"
    path.write_text(json.dumps(rows))
    return path
