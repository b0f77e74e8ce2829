"""Timelines of Intel's unitrace, of Ray and of MPI calls, as their writers form them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START = 1_700_000_000_000_000
HOST, DEVICE = 4100, 4101


def write_unitrace(path: Path, rank: int | None = None) -> Path:
    """Two kernels and a copy with their calls, a synchronization, and a range of ITT."""
    prefix = "" if rank is None else f"RANK {rank} "
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": HOST, "ts": START, "args": {"name": f"{prefix}HOST<node1>"}},
        {"ph": "M", "name": "process_name", "pid": DEVICE, "ts": START,
         "args": {"name": f"{prefix}DEVICE<0000:29:00.0>[0]"}},
        {"ph": "M", "name": "thread_name", "pid": DEVICE, "tid": 1, "args": {"name": "L0 Thread 7 Engine<0,0>"}},
        {"ph": "X", "tid": 7, "pid": HOST, "name": "aten::mm", "cat": "cpu_op", "ts": START + 1.5, "dur": 99.25},
    ]  # fmt: skip
    work = (
        (1, "zeCommandListAppendLaunchKernel", "gemm_kernel[SIMD32 {64; 2; 1} {256; 1; 1}]", 10, 40),
        (2, "zeCommandListAppendLaunchKernel", "elementwise[SIMD16 {8; 1; 1} {128; 1; 1}]", 20, 120),
        (3, "zeCommandListAppendMemoryCopy", "zeCommandListAppendMemoryCopy(D2M)[4096]", 30, 200),
    )
    for number, call, name, at, begin in work:
        flow = f"Flow_H2D_{number}_{rank or 0}"
        start = START + begin
        rows += [
            {"ph": "X", "tid": 7, "pid": HOST, "name": call, "cat": "cpu_op", "ts": START + at, "dur": 5.125, "id": 9},
            {"ph": "s", "tid": 7, "pid": HOST, "name": "dep", "cat": flow, "ts": START + at, "id": number},
            {"ph": "X", "tid": 1, "pid": DEVICE, "name": name, "cat": "gpu_op", "ts": start, "dur": 60.5,
             "args": {"id": str(number)}},
            {"ph": "t", "tid": 1, "pid": DEVICE, "name": "dep", "cat": flow, "ts": start, "id": number},
        ]  # fmt: skip
    call = "zeCommandQueueSynchronize"
    rows.append(
        {
            "ph": "X",
            "tid": 7,
            "pid": HOST,
            "name": call,
            "cat": "cpu_op",
            "ts": START + 110,
            "dur": 200,
            "id": 4,
        }
    )
    path.write_text(json.dumps({"traceEvents": rows}))
    return path


def write_ray_timeline(path: Path) -> Path:
    """Two tasks of a worker with their phases, and a call of the driver, as `ray timeline` writes them."""
    worker, driver = "worker:" + "0a" * 28, "driver:" + "0b" * 28
    rows: list[dict[str, Any]] = []
    for number, at in enumerate((0, 5000)):
        phases = (
            ("task::train_step", 0, 4000),
            ("task:deserialize_arguments", 10, 200),
            ("task:execute", 300, 3500),
        )
        rows += [
            {"cat": cat, "name": "train_step" if number == 0 and "::" in cat else cat, "pid": 0, "tid": 1,
             "ts": START + at + begin, "dur": dur, "ph": "X", "cname": "generic_work",
             "args": {"name": "train_step", "task_id": f"{number:048x}"}}
            for cat, begin, dur in phases
        ]  # fmt: skip
    rows.append({"cat": "ray.get", "name": "ray.get", "pid": 0, "tid": 0, "ts": START, "dur": 9000.0, "ph": "X",
                 "cname": "good", "args": {}})  # fmt: skip
    rows.append({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "Node 10.0.0.1"}})
    names = {1: worker, 0: driver}
    rows += [
        {"name": "thread_name", "ph": "M", "tid": tid, "pid": 0, "args": {"name": name}}
        for tid, name in names.items()
    ]
    path.write_text(json.dumps(rows))
    return path


MIB = 1 << 18
"""Floats in a MiB."""


def write_mpi(path: Path, pids: tuple[int, ...] = (0, 1)) -> Path:
    """An all-reduce, a message from the first rank to the second one, a barrier, and a process without calls."""
    events: list[dict[str, Any]] = [
        {"name": "python", "ph": "X", "pid": 99, "tid": 0, "ts": 0, "dur": 5, "args": {}}
    ]
    for place, pid in enumerate(pids):

        def add(name: str, ts: float, dur: float, pid: int = pid, **args: Any) -> None:
            events.append({"name": name, "ph": "X", "pid": pid, "tid": 0, "ts": ts, "dur": dur, "args": args})

        add("compute", 0, 90)
        add("MPI_Allreduce", 100 + 5 * place, 50 - 5 * place, comm=0, count=MIB, datatype="0x09")
        add("MPI_Send" if place == 0 else "MPI_Recv", 200, 10, comm=0, count=100, datatype=10, tag=3,
            **({"dest": 1} if place == 0 else {"source": 0}))  # fmt: skip
        add("MPI_Ibcast", 250, 5, comm=0, count=8, datatype=1, root=0)
        add("MPI_Barrier", 300, 20, comm=0)
        add("MPI_Comm_rank", 400, 1)
    path.write_text(json.dumps({"traceEvents": events}))
    return path
