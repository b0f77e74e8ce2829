"""A trace of Ascend's profiler, as its trace_view.json, its database and its table of kernels state it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
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


SCHEMA = """
create table STRING_IDS (id integer primary key, value text);
create table ENUM_API_TYPE (id integer, name text);
create table ENUM_HCCL_DATA_TYPE (id integer, name text);
create table PYTORCH_API (startNs integer, endNs integer, globalTid integer, connectionId integer, name integer,
  sequenceNumber integer, fwdThreadId integer, inputDtypes integer, inputShapes integer, callchainId integer,
  type integer);
create table CONNECTION_IDS (id integer, connectionId integer);
create table CANN_API (startNs integer, endNs integer, type integer, globalTid integer, connectionId integer,
  name integer);
create table TASK (startNs integer, endNs integer, deviceId integer, connectionId integer, globalTaskId integer,
  globalPid integer, taskType integer, contextId integer, streamId integer, taskId integer, modelId integer);
create table COMPUTE_TASK_INFO (name integer, globalTaskId integer, blockDim integer, mixBlockDim integer,
  taskType integer, opType integer, inputFormats integer, inputDataTypes integer, inputShapes integer);
create table COMMUNICATION_TASK_INFO (name integer, globalTaskId integer, taskType integer, planeId integer,
  size integer);
create table COMMUNICATION_OP (opName integer, startNs integer, endNs integer, connectionId integer, groupName integer,
  opId integer, relay integer, retry integer, dataType integer, algType integer, count numeric, opType integer,
  deviceId integer);
create table MEMCPY_INFO (globalTaskId integer, size integer, memcpyOperation integer);
create table MSTX_EVENTS (startNs integer, endNs integer, eventType integer, rangeId integer, category integer,
  message integer, globalTid integer, endGlobalTid integer, domainId integer, connectionId integer);
create table STEP_TIME (id integer, startNs integer, endNs integer);
create table NPU_INFO (id integer, name text);
create table RANK_DEVICE_MAP (rankId integer, deviceId integer);
create table HOST_INFO (hostUid text, hostName text);
create table AICORE_FREQ (deviceId integer, timestampNs numeric, freq integer);
"""
"""Of the tables of ascend_pytorch_profiler_<rank>.db (CANN 8), with the columns that torch_npu writes."""
MAIN, BACKWARD = (10 << 32) + 11, (10 << 32) + 12
_TYPES = {50001: "op", 50002: "queue", 50004: "mstx", 20000: "acl", 10000: "node", 5500: "communication"}


def write_database(path: Path, rank: int = 0, repeat: int = 1) -> Path:
    """Write the database of a rank: two operators, their kernels, a wait, a copy, a range and a collective."""
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    start = START * 1000
    rows: dict[str, list[tuple[Any, ...]]] = {"AICORE_FREQ": [(2, start, 1650)]}

    def add(table: str, *values: Any) -> None:
        rows.setdefault(table, []).append(values)

    for step in range(repeat):
        at, link = start + step * 1_000_000, 10 * step
        add("STEP_TIME", step + 4, at, at + 900_000)
        add("PYTORCH_API", at + 10_000, at + 60_000, MAIN, link, text("aten::mm"), 3, 0, text("float;float"),
            text("2,3;3,4"), None, 50001)  # fmt: skip
        add("PYTORCH_API", at + 70_000, at + 90_000, BACKWARD, link + 1, text("MmBackward0"), 3, 11,
            text("float;Scalar"), text("2,4;"), None, 50001)  # fmt: skip
        add(
            "PYTORCH_API",
            at + 91_000,
            at + 92_000,
            MAIN,
            None,
            text("Enqueue@mm"),
            None,
            None,
            None,
            None,
            None,
            50002,
        )
        for number, (name, kind, task, begin, end) in enumerate(
            (("MatMulV2", "AI_CORE", 1, 40, 140), ("Cast", "MIX_AIV", 2, 140, 170))
        ):
            connection = 100 + link + number
            add("CONNECTION_IDS", link + number, connection)
            call = at + 20_000 + 50_000 * number
            add("CANN_API", call, call + 5_000, 10000, (10 << 32) + 99, connection, text("launch"))
            add(
                "TASK",
                at + begin * 1000,
                at + end * 1000,
                2,
                connection,
                task + link,
                10,
                text(kind),
                0,
                3,
                task,
                9,
            )
            add(
                "COMPUTE_TASK_INFO",
                text(name),
                task + link,
                20,
                0,
                text(kind),
                text(name),
                0,
                0,
                text("2,3;3,4"),
            )
        add("TASK", at + 170_000, at + 230_000, 2, None, 3 + link, 10, text("EVENT_WAIT"), 0, 3, 3, 9)
        add("TASK", at + 230_000, at + 240_000, 2, None, 4 + link, 10, text("MEMCPY_ASYNC"), 0, 3, 4, 9)
        add("MEMCPY_INFO", 4 + link, 4096, 1)
        add("TASK", at + 161_000, at + 181_000, 2, 109 + link, 5 + link, 10, text("NOTIFY_WAIT"), 0, 7, 5, 9)
        add("COMMUNICATION_TASK_INFO", text("Notify_Wait"), 5 + link, text("NOTIFY_WAIT"), 1, 0)
        add("COMMUNICATION_OP", text("hcom_allReduce__503_0_1"), at + 160_000, at + 230_000, 109 + link, text("503"),
            step, 0, 0, 4, 0, 1024, text("hcom_allReduce_"), 2)  # fmt: skip
        add("CANN_API", at + 150_000, at + 155_000, 5500, MAIN, 109 + link, text("launch"))
        add("MSTX_EVENTS", at + 5_000, at + 95_000, 2, 0, 0, text("forward"), MAIN, MAIN, 0, None)
    rows |= {
        "ENUM_API_TYPE": list(_TYPES.items()),
        "ENUM_HCCL_DATA_TYPE": [(4, "FP32")],
        "NPU_INFO": [(2, "Ascend910B4")],
    }
    rows |= {"RANK_DEVICE_MAP": [(rank, 2)], "HOST_INFO": [("1", "host0")]}
    rows["STRING_IDS"] = [(number, value) for value, number in texts.items()]
    with closing(sqlite3.connect(path)) as connection_, connection_:
        connection_.executescript(SCHEMA)
        for table, values in rows.items():
            connection_.executemany(f"insert into {table} values ({', '.join('?' * len(values[0]))})", values)
    return path


def write_cluster_communication(path: Path, ranks: int = 2) -> Path:
    """Write the times of two collectives and a sum on each rank, as msprof-analyze writes them of a cluster."""

    def describe(rank: int, at: float) -> dict[str, Any]:
        times = {"Start Timestamp(us)": START + at + 10 * rank, "Elapse Time(ms)": 0.5 - 0.01 * rank,
                 "Transit Time(ms)": 0.3, "Wait Time(ms)": 0.1, "Idle Time(ms)": 0.1}  # fmt: skip
        link = {
            "Transit Size(MB)": 4.0,
            "Transit Time(ms)": 0.3,
            "Bandwidth(GB/s)": 13.3,
            "Size Distribution": {},
        }
        return {"Communication Time Info": times, "Communication Bandwidth Info": {"HCCS": link}}

    operators = {
        f"hcom_{name}__503_{number}_1@503": {str(rank): describe(rank, at) for rank in range(ranks)}
        for number, (name, at) in enumerate((("allReduce", 0.5), ("allGather", 1000)))
    }
    operators["Total Op Info"] = {str(rank): describe(rank, 0) for rank in range(ranks)}
    path.write_text(json.dumps({str(tuple(range(ranks))): {"step4": operators}, "p2p": {}}))
    return path


KERNEL_COLUMNS = (
    "Step Id", "Device_id", "Model ID", "Task ID", "Stream ID", "Name", "Type", "OP State", "Accelerator Core",
    "Start Time(us)", "Duration(us)", "Wait Time(us)", "Block Dim", "Input Shapes",
)  # fmt: skip


def write_kernel_table(path: Path) -> Path:
    """Write the kernels of the same recording as kernel_details.csv."""
    rows = [
        (4, 2, 9, 1, 3, "MatMulV2", "MatMulV2", "", "AI_CORE", f"{START + 40}.125", "100.5", "0", 20, '"2,3;3,4"'),
        (4, 2, 9, 2, 3, "Cast", "Cast", "", "MIX_AIV", f"{START + 140}.750\t", "30", "0", 20, ""),
        (4, 2, 9, 3, 4, "hcom_allReduce__503_0_1", "hcom", "", "COMMUNICATION", f"{START + 160}", "70", "", "", ""),
    ]  # fmt: skip
    path.write_text("\n".join(",".join(map(str, row)) for row in (KERNEL_COLUMNS, *rows)) + "\n")
    return path
