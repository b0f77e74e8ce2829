"""Recordings of one process by two profilers on clocks that differ: Kineto's operators, and another one's kernels."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from support.chrome_timelines import DEVICE
from support.rocm_recordings import DOMAINS, GPUS, START, Recording
from support.small_traces import complete_event

PID = 4100
KERNEL = "void gemm<float>(float*, int)"


@dataclass(frozen=True)
class Launch:
    """An operator with its call and kernel; times in ns since the process began."""

    operator: str
    step: int
    start: int
    end: int
    call: int
    kernel: int
    kernel_end: int


def make_launches(steps: int = 8, per_step: int = 60, seed: int = 1) -> list[Launch]:
    """Steps of like operators, whose times vary as those of Python do."""
    rng = random.Random(seed)
    launches = []
    at = device = 1_000_000
    for step in range(steps):
        at += rng.randrange(200_000, 900_000)
        for number in range(per_step):
            at += rng.randrange(4_000, 40_000)
            call, end = at + rng.randrange(3_000, 6_000), at + rng.randrange(14_000, 22_000)
            device = max(device, call + 9_000) + rng.randrange(500, 1_500)
            finish = device + rng.randrange(3_000, 30_000)
            launches.append(Launch(f"aten::op{number % 7}", step, at, end, call, device, finish))
            device, at = finish, end
    return launches


def write_kineto(path: Path, launches: list[Launch], *, calls: bool, kernels: bool, noise: int = 1) -> Path:
    """Write a profile of the launches, optionally with the calls of HIP and the kernels as Kineto times them."""
    rng = random.Random(noise)
    events = []
    for step in sorted({launch.step for launch in launches}):
        inside = [launch for launch in launches if launch.step == step]
        start, end = inside[0].start - 2_000, inside[-1].end + 2_000
        events.append(
            complete_event(
                "user_annotation", f"ProfilerStep#{step}", start / 1e3, (end - start) / 1e3, PID, PID
            )
        )
    for number, launch in enumerate(launches, 1):
        length = (launch.end - launch.start) / 1e3
        events.append(complete_event("cpu_op", launch.operator, launch.start / 1e3, length, PID, PID))
        if calls:
            at = (launch.call + rng.randrange(-400, 400)) / 1e3
            events.append(
                complete_event("cuda_runtime", "hipLaunchKernel", at, 4, PID, PID, correlation=number)
            )
        if kernels:
            at = (launch.kernel + rng.randrange(-900, 900)) / 1e3
            length = (launch.kernel_end - launch.kernel) / 1e3
            ids = {"correlation": number, "device": 0, "stream": 0}
            events.append(complete_event("kernel", KERNEL, at, length, 0, 0, **ids))
    document = {"traceEvents": events, "schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000_000_000_000}
    path.write_text(json.dumps(document))
    return path


def record_with_rocprof(launches: list[Launch], *, drift: float = 0.0) -> Recording:
    """Record the launches on the clock of the machine, which is `START` at their zero, and runs faster by ``drift``."""
    recording = Recording(PID, {})

    def convert(ns: int) -> int:
        return START + ns + round(ns * drift)

    for number, launch in enumerate(launches, 1):
        times = {"start": convert(launch.call), "end": convert(launch.call + 4_000)}
        call = {"domain": DOMAINS[0], "name": "hipLaunchKernel", "tid": PID, "id": number, "text": ""}
        recording.calls.append(call | times)
        shape = {"grid": [1024, 1, 1], "block": [256, 1, 1], "shared": 0}
        kernel = {"id": number, "kernel": 0, "queue": 1, "stream": 1, "agent": GPUS[0]} | shape
        recording.kernels.append(
            kernel | {"start": convert(launch.kernel), "end": convert(launch.kernel_end)}
        )
    return recording


def write_unitrace(path: Path, launches: list[Launch], offset_us: int, tid: int = PID) -> Path:
    """Write the launches as unitrace does, with its clock ahead of Kineto's relative times by ``offset_us``."""
    rows = [
        {"ph": "M", "name": "process_name", "pid": PID, "ts": 0, "args": {"name": "HOST<node1>"}},
        {"ph": "M", "name": "process_name", "pid": DEVICE, "ts": 0,
         "args": {"name": "DEVICE<0000:29:00.0>[0]"}},
    ]  # fmt: skip
    for number, launch in enumerate(launches, 1):
        at, begin = launch.call / 1e3 + offset_us, launch.kernel / 1e3 + offset_us
        flow, length = f"Flow_H2D_{number}_0", (launch.kernel_end - launch.kernel) / 1e3
        host, device = {"tid": tid, "pid": PID}, {"tid": 1, "pid": DEVICE}
        rows += [
            {"ph": "X", **host, "name": "zeCommandListAppendLaunchKernel", "cat": "cpu_op", "ts": at, "dur": 4},
            {"ph": "s", **host, "name": "dep", "cat": flow, "ts": at, "id": number},
            {"ph": "X", **device, "name": "gemm[SIMD32 {64; 2; 1} {256; 1; 1}]", "cat": "gpu_op",
             "ts": begin, "dur": length, "args": {"id": str(number)}},
            {"ph": "t", **device, "name": "dep", "cat": flow, "ts": begin, "id": number},
        ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": rows}))
    return path


def write_nsys(path: Path, launches: list[Launch], epoch: int, *, drift: float = 0.0) -> Path:
    """Write the launches as an export of Nsight Systems that began at ``epoch``; its clock is faster by ``drift``."""
    process = PID << 24
    names = {1: "cudaLaunchKernel_v7000", 2: KERNEL, 3: "gemm"}

    def convert(ns: int) -> int:
        return ns + round(ns * drift)

    tables = {
        "StringIds": ("id value", list(names.items())),
        "TARGET_INFO_SESSION_START_TIME": ("utcEpochNs", [(epoch,)]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (
            "start end globalTid correlationId nameId",
            [
                (convert(launch.call), convert(launch.call + 4_000), process | PID, number, 1)
                for number, launch in enumerate(launches, 1)
            ],
        ),
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            "start end deviceId contextId streamId correlationId globalPid demangledName shortName",
            [
                (convert(launch.kernel), convert(launch.kernel_end), 0, 1, 7, number, process, 2, 3)
                for number, launch in enumerate(launches, 1)
            ],
        ),
    }
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db, db:
        for table, (columns, rows) in tables.items():
            db.execute(f"CREATE TABLE {table} ({columns.replace(' ', ', ')})")
            db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns.split()))})", rows)
    return path
