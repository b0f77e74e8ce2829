"""Checks of the traces to be linked that need no other information: a truncated file, files of two processes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import polars as pl

from etloom.core import categories
from etloom.core.schema import Stat
from etloom.core.trace import Trace

TRUNCATION_STATS = ("read.truncated", "read.corrupt_compression")
"""Names of stats of a file that ends early."""
GPU_CUT_OFF = "read.missing_gpu_events"


def flag_missing_gpu_events(trace: Trace) -> Trace:
    """Return the trace with a row of stats if its file names a GPU and ends before the GPU events.

    Without this check a truncated GPU trace looks like a CPU-only trace, because GPU events are written last.
    """
    stats = trace.table("stats")["name"]
    if not stats.is_in(TRUNCATION_STATS).any() or stats.is_in([GPU_CUT_OFF]).any():
        return trace
    if not (names := list_device_names(trace)):
        return trace
    on_device = trace.scan("events").filter(pl.col("cat").is_in(list(categories.DEVICE_CATEGORIES))).head(1)
    if on_device.select(pl.len()).collect(engine=trace.engine).item():
        return trace
    example = f"the file ends before the work of {', '.join(names)}: times are of the host alone"
    return trace.count(GPU_CUT_OFF, 1, example, "error")


def list_device_names(trace: Trace) -> list[str]:
    """Return the distinct device models that the header of the file names."""
    properties = [entry for entry in trace.meta.get("device_properties", ()) if isinstance(entry, dict)]
    return sorted({str(entry["name"]) for entry in properties if entry.get("name")})


def check_processes(traces: Sequence[Trace]) -> list[Stat]:
    """Return a row of stats if an execution trace and a Kineto trace name different processes.

    Both record the process id that the system reports, so in one process they agree; two runs of one program may
    agree in everything else that linking uses.
    """
    node_processes: dict[int, str] = {}
    event_processes: dict[int, str] = {}
    for trace in traces:
        if _has_format(trace, "execution_trace"):
            node_processes |= _read_node_process(trace)
        elif _has_format(trace, "kineto"):
            event_processes |= _find_event_processes(trace)
    if not node_processes or not event_processes or node_processes.keys() & event_processes.keys():
        return []
    (node_pid, node_time), (event_pid, event_time) = (
        next(iter(processes.items())) for processes in (node_processes, event_processes)
    )
    example = (
        f"the execution trace is of process {node_pid}{node_time}, the Kineto trace of process {event_pid}"
        f"{event_time}: operators, shapes and sizes are of one run and times of another"
    )
    return [Stat("link.processes_differ", "error", 1, example)]


def _has_format(trace: Trace, name: str) -> bool:
    return list(trace.meta.get("formats", ())) == [name]


def _read_node_process(trace: Trace) -> dict[int, str]:
    """Return the process id in the header of an execution trace, with the text of its recording time."""
    header = trace.meta.get("header", {}).get("execution_trace")
    if isinstance(header, dict) and type(pid := header.get("pid")) is int:
        return {pid: f", recorded {header['time']}" if isinstance(header.get("time"), str) else ""}
    return {}


def _find_event_processes(trace: Trace) -> dict[int, str]:
    """Return the process ids of the operators of a Kineto trace, with the text of their first time."""
    operators = trace.scan("events").filter(pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)))
    first_times = operators.group_by("pid").agg(pl.col("ts").min()).drop_nulls().sort("ts")
    is_epoch = trace.meta.get("clock") == "epoch"
    return {
        pid: _format_time(ts) if is_epoch else ""
        for pid, ts in first_times.collect(engine=trace.engine).iter_rows()
    }


def _format_time(ns: int) -> str:
    return f", recorded {datetime.fromtimestamp(ns // 10**9, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
