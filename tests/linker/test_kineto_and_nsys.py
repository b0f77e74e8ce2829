"""One run told by Kineto and by Nsight Systems gives the same tables: a real Kineto trace, written as an export."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.trace import Trace

PID = 200
COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
MEMORY = {"Pageable": 0, "Pinned": 1, "Device": 2}
DEVICE = "start end deviceId contextId streamId correlationId globalPid"
NAMES = (
    *(
        "temporal-breakdown",
        "kernel-overlap",
        "comm-overlap",
        "kernel-breakdown",
        "kernel-families",
        "idle-time",
    ),
    *("launch-stats", "queue-summary", "memory-bandwidth-summary", "steps", "top-ops", "operator-delays"),
    *("launches", "queue-length", "memory-bandwidth", "annotated-kernels", "annotations", "kernel-sequences"),
    *("short-kernels", "call-stacks"),
)


def write_export(trace: Trace, path: Path) -> None:
    """The trace's operators, ranges, calls and device work as Nsight Systems exports them."""
    events = trace.events.drop_nulls("dur").with_columns(pl.col(pl.Categorical).cast(pl.String))
    facts = dict(trace.kernels.select("event", "bytes").rows())
    process, first = 1 << 48 | PID << 24, events["ts"].min()
    rows: dict[str, list[tuple[Any, ...]]] = {
        "KERNEL": [],
        "MEMCPY": [],
        "MEMSET": [],
        "RUNTIME": [],
        "NVTX": [],
    }
    texts: dict[str, int] = {}
    for event in events.iter_rows(named=True):
        start, name = event["ts"] - first, event["name"]
        span = (start, start + event["dur"])
        thread = process | event["tid"] % (1 << 24)
        on = (event["device"], 1, event["stream"], event["correlation"], process)
        text = texts.setdefault(name, len(texts))
        match event["cat"]:
            case "kernel":
                rows["KERNEL"].append((*span, *on, text))
            case "gpu_memcpy":
                way, ends = name.removeprefix("Memcpy ").rstrip(")").split(" (")
                kinds = (COPIES[way], *(MEMORY[end] for end in ends.split(" -> ")))
                rows["MEMCPY"].append((*span, *on, facts[event["id"]], *kinds))
            case "gpu_memset":
                rows["MEMSET"].append((*span, *on, 0, facts[event["id"]], 2))
            case "cuda_runtime":
                rows["RUNTIME"].append((*span, 0, thread, event["correlation"], text, 0))
            case "cpu_op" | "user_annotation":
                # Nsight numbers what PyTorch says of its operators; other ranges have no number.
                said = f"{name}, op_id = {event['id']}" if event["cat"] == "cpu_op" else name
                rows["NVTX"].append((*span, 59, said, thread, 0))
    columns = {
        "CUPTI_ACTIVITY_KIND_KERNEL": ("KERNEL", f"{DEVICE} demangledName"),
        "CUPTI_ACTIVITY_KIND_MEMCPY": ("MEMCPY", f"{DEVICE} bytes copyKind srcKind dstKind"),
        "CUPTI_ACTIVITY_KIND_MEMSET": ("MEMSET", f"{DEVICE} value bytes memKind"),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (
            "RUNTIME",
            "start end eventClass globalTid correlationId nameId returnValue",
        ),
        "NVTX_EVENTS": ("NVTX", "start end eventType text globalTid domainId"),
        "StringIds": ("STRINGS", "id value"),
    }
    rows["STRINGS"] = [(number, text) for text, number in texts.items()]
    with sqlite3.connect(path) as db:
        for table, (of, names) in columns.items():
            db.execute(f"CREATE TABLE {table} ({', '.join(names.split())})")
            db.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(names.split()))})", rows[of])
    db.close()


OPTIONS = {"top-ops": {"top": 10_000}}
CLOCK = ("start_ns", "device_start_ns", "device_end_ns", "call_start_ns", "ts_ns")


def said(trace: Trace, name: str) -> list[tuple[Any, ...]]:
    """The rows, with times since the first kernel, and without rates that Kineto states and Nsight does not."""
    table = etloom.analyze(trace, name, **OPTIONS.get(name, {}))
    stated = [column for column in table.columns if "gb_per_s" in column and column != "mean_gb_per_s"]
    table = table.drop(*stated, "pid", "tid", "node", "parent", strict=False)
    first = trace.events.filter(pl.col("cat") == "kernel")["ts"].min()
    clock = {*CLOCK, *(["time_ns"] if name == "queue-length" else [])}
    since = [pl.col(column) - first for column in table.columns if column in clock]
    return [tuple(map(str, row)) for row in table.with_columns(since).sort(pl.exclude(pl.List)).rows()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm/kineto_trace_0.json.gz", "nccl_ddp/kineto_trace_0.json.gz"])
def test_the_same_tables_from_both(data: Path, tmp_path: Path, name: str) -> None:
    one = next(iter(etloom.open(data / name, use_cache=False).values()))
    write_export(one, tmp_path / "run.sqlite")
    other = next(iter(etloom.open(tmp_path / "run.sqlite", use_cache=False).values()))
    for analysis in NAMES:
        rows = said(one, analysis)
        assert rows and said(other, analysis) == rows, analysis
