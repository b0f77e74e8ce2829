"""Merge the traces of one rank into one: an execution trace and a profiler trace, or a trace that holds both.

Merging also checks what needs no other information: a file that ends before its GPU events, files of two processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from os import PathLike

import polars as pl

from etloom.core import categories
from etloom.core.errors import EtloomError, LinkError
from etloom.core.schema import TABLES, Stat
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job, Trace

_DERIVED_TABLES = ("links", "launches", "thread_dependencies", "sync_dependencies")
_TABLES_FROM_FILE = ("links", "launches")
"""The tables among them that a file with nodes and events in one (ET+, Chakra) states itself."""
_CONCATENATED_META = ("files", "formats")

TRUNCATION_STATS = ("read.truncated", "read.corrupt_compression")
"""Names of stats of a file that ends early."""
GPU_CUT_OFF = "read.missing_gpu_events"


def merge_traces(traces: tuple[Trace, ...]) -> Trace:
    """Merge the tables of the traces of one rank into one Trace.

    Results of an earlier link are dropped; links stated by a file remain.

    Raises:
        LinkError: There is nothing to link, or two traces hold profiler events, or two hold operators.
    """
    if not traces:
        raise LinkError("no trace to link", remedy="pass an execution trace, a profiler trace, or both")
    traces = _drop_observer_times(_reduce_snapshots(traces))
    for name, description in (("events", "profiler traces"), ("nodes", "execution traces")):
        holders = [trace for trace in traces if trace.table(name).height]
        if len(holders) > 1:
            raise LinkError(
                f"{len(holders)} {description} of one rank cannot be linked to each other",
                where=", ".join(file for trace in holders for file in map(str, trace.meta.get("files", ()))),
                remedy="pass one execution trace and one profiler trace",
            )
    stated = _TABLES_FROM_FILE if any((trace.links["how"] == "file").any() for trace in traces) else ()
    tables = {}
    for name in TABLES:
        parts = [part for trace in traces if (part := trace.table(name)).height]
        if parts and (name in stated or name not in _DERIVED_TABLES):
            tables[name] = parts[0] if len(parts) == 1 else _concat_table(name, parts)
    if "stats" in tables:
        tables["stats"] = tables["stats"].filter(~pl.col("name").str.starts_with("link."))
    meta: dict[str, object] = {}
    for trace in traces:
        for key, value in trace.meta.items():
            if key in _CONCATENATED_META:
                meta[key] = [*meta.get(key, []), *value]  # type: ignore[misc]
            elif isinstance(value, dict) and isinstance(previous := meta.get(key), dict):
                meta[key] = {**previous, **value}
            elif value is not None or key not in meta:
                meta[key] = value
    merged = Trace(tables, meta)
    ranks = sorted({trace.rank for trace in traces if trace.rank is not None})
    if len(ranks) > 1:
        merged = merged.count("link.ranks_differ", 1, f"the files state ranks {ranks}", "error")
    return merged


def select_rank(read: Trace | Job, rank: int | None, file: str | PathLike[str]) -> Trace:
    """Return the Trace of one rank of a file, with ``meta["rank"]``.

    Adds an error to stats if the file states another rank.

    Raises:
        EtloomError: The file holds several ranks and none is requested.
        AnalysisError: The file does not hold the rank.
    """
    if isinstance(read, Job):
        if rank is None:
            available = ", ".join(map(str, read))
            raise EtloomError(f"contains the ranks {available}", where=file, remedy="select one with --rank")
        if rank not in read:
            raise unknown_rank_error(rank, read)
        read = read[rank]
    if rank is None:
        return read
    other = f"{file} states rank {read.rank}; read as rank {rank}"
    differ = read.rank not in (None, rank)
    return read.replace(meta={"rank": rank}).count("job.rank_mismatch", int(differ), other, "error")


def _drop_observer_times(traces: tuple[Trace, ...]) -> tuple[Trace, ...]:
    """Drop the timed events of etloom's observer if there is a profiler trace.

    The profiler's times are on the clock of the device's events.
    """
    if not any(trace.events.height and trace.meta.get("formats") != ["observer"] for trace in traces):
        return traces
    return tuple(
        trace.replace(events=TABLES["events"].empty()) if trace.meta.get("formats") == ["observer"] else trace
        for trace in traces
    )


def _reduce_snapshots(traces: tuple[Trace, ...]) -> tuple[Trace, ...]:
    """Reduce memory snapshots to their history if there are other traces, which have the events and the clock.

    Their curve of the memory is on the clock of the snapshot: it is left out, and counted, if the others have another.
    """
    others = [trace for trace in traces if not trace.is_snapshot]
    if not others:
        return traces
    has_memory = any(trace.table("memory").height for trace in others)
    clocks = {trace.meta["clock"] for trace in others if "clock" in trace.meta}
    facts = ("formats", "files", "header", "rank", *(() if clocks else ("clock", "base_ns")))

    def reduce(snapshot: Trace) -> Trace:
        has_other_clock = bool(clocks - {snapshot.meta.get("clock")})
        tables = ("allocator", "stats", *(() if has_memory or has_other_clock else ("memory",)))
        reduced = Trace(
            {name: snapshot.table(name) for name in tables},
            {name: value for name, value in snapshot.meta.items() if name in facts},
        )
        rows = 0 if has_memory or not has_other_clock else snapshot.table("memory").height
        example = f"the events of the rank are on a clock that is {', '.join(sorted(map(str, clocks)))}"
        return reduced.count("read.memory_on_other_clock", rows, example, "data_loss")

    return tuple(reduce(trace) if trace.is_snapshot else trace for trace in traces)


def _concat_table(name: str, parts: list[pl.DataFrame]) -> pl.DataFrame:
    both = pl.concat(parts)
    if name == "groups":
        return both.unique(maintain_order=True)
    if "id" in both.columns:
        return both.with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("id"))
    return both


def flag_missing_gpu_events(trace: Trace) -> Trace:
    """Return the trace with an error in stats if the file names a GPU but was truncated before the GPU events.

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
    example = f"the file ends before the GPU events of {', '.join(names)}: times cover the host only"
    return trace.count(GPU_CUT_OFF, 1, example, "error")


def list_device_names(trace: Trace) -> list[str]:
    """Return the distinct GPU model names in the header of the file, sorted."""
    properties = [entry for entry in trace.meta.get("device_properties", ()) if isinstance(entry, dict)]
    return sorted({str(entry["name"]) for entry in properties if entry.get("name")})


def check_processes(traces: Sequence[Trace]) -> list[Stat]:
    """Return an error for stats if an execution trace and a Kineto trace were recorded in different processes.

    Both record the process id that the system reports, so in one process they agree; two runs of one program may
    agree in everything else that linking uses.
    """
    node_processes: dict[int, str] = {}
    event_processes: dict[int, str] = {}
    for trace in traces:
        if _has_format(trace, "execution_trace"):
            node_processes |= _read_node_process(trace)
    if not node_processes:
        return []  # looking at all events would be in vain
    for trace in traces:
        if _has_format(trace, "kineto"):
            event_processes |= _find_event_processes(trace)
    if not event_processes or node_processes.keys() & event_processes.keys():
        return []
    (node_pid, node_time), (event_pid, event_time) = (
        next(iter(processes.items())) for processes in (node_processes, event_processes)
    )
    example = (
        f"the execution trace is of process {node_pid}{node_time}, the Kineto trace of process {event_pid}"
        f"{event_time}: operators, shapes and sizes belong to one run and times to another"
    )
    return [Stat("link.processes_differ", "error", 1, example)]


def _has_format(trace: Trace, name: str) -> bool:
    return list(trace.meta.get("formats", ())) == [name]


def _read_node_process(trace: Trace) -> dict[int, str]:
    """Return {process id: recording time as text} from the header of an execution trace; empty if missing."""
    header = trace.meta.get("header", {}).get("execution_trace")
    if isinstance(header, dict) and type(pid := header.get("pid")) is int:
        return {pid: f", recorded {header['time']}" if isinstance(header.get("time"), str) else ""}
    return {}


def _find_event_processes(trace: Trace) -> dict[int, str]:
    """Return {process id: time of the first operator as text} of a Kineto trace."""
    operators = trace.scan("events").filter(pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)))
    stated = operators.filter(pl.col("pid") >= 0)  # others are names, or absent in the file
    first_times = stated.group_by("pid").agg(pl.col("ts").min()).drop_nulls().sort("ts")
    is_epoch = trace.meta.get("clock") == "epoch"
    return {
        pid: _format_time(ts) if is_epoch else ""
        for pid, ts in first_times.collect(engine=trace.engine).iter_rows()
    }


def _format_time(ns: int) -> str:
    return f", recorded {datetime.fromtimestamp(ns // 10**9, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
