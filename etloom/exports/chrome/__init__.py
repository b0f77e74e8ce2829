"""Chrome trace JSON as Kineto writes it: for Perfetto (https://ui.perfetto.dev), chrome://tracing and HTA.

Of one rank, processes, threads and times are as they were read, so the file reads back to the same events. Of
several ranks, each process becomes one of its own, called by its rank; the file says so in ``mergedRanks``, and is to
be looked at, not read back. Slices that overlap without nesting go
to sub-lanes, since Perfetto drops them. An arrow leads from each launch call to its device work. What only an
execution trace holds (nodes, tensors) has no time and is left out.

Format: Trace Event Format, with the names of Kineto's output_json.cpp. ts and dur are decimal microseconds,
exact to the nanosecond, relative to ``baseTimeNanoseconds`` where the clock is that of the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Job, Trace
from etloom.formats.io.atomic_file import open_atomic
from etloom.formats.io.json_text import join_lines, quote_texts
from etloom.formats.kineto import tracks
from etloom.formats.kineto.event_json import (
    ARGUMENT_NAMES,
    MEMORY_ARGUMENT_NAMES,
    format_arguments,
    format_objects,
    split_extra_args,
)

SUFFIX = (".json", ".json.gz")
_CHUNK = 1 << 16


def write(trace: Trace | Job, path: str | PathLike[str], *, overlay: str | None = None) -> None:
    """Write a Trace or a Job to one file, packed where its name ends in .gz.

    overlay: critical-path draws what the run's duration hangs on, as arrows.

    Raises EtloomError for a trace without timed events.
    """
    if overlay not in (None, "critical-path"):
        raise UnknownName("overlay", overlay, ["critical-path"], option="overlay")
    traces = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    if not any(one.events.height for one in traces.values()):
        raise EtloomError(
            "the trace holds no timed events to draw", where=path, remedy="export it as Parquet"
        )
    several = len(traces) > 1
    base = _base_time(traces.values())
    pid, flow = 1, 1
    with open_atomic(Path(path)) as file:
        file.write(_format_header(traces, base))
        separator = b""
        places = {}
        for rank, one in traces.items():
            lanes, where = _assign_tracks(one, rank if several else None, pid)
            places[rank] = where if overlay else where.clear()
            for lines in _format_events(one, lanes, where, rank if several else None, base, flow):
                if lines.len():
                    file.write(separator + join_lines(lines))
                    separator = b",\n"
            pid += len(tracks.list_processes(one))
            flow += one.launches.height + one.flows["flow"].n_unique()
        for rank, ends in (_build_overlay(traces, flow) if overlay else {}).items():
            placed = ends.join(places[rank].drop("ts"), on="id", maintain_order="left")
            lines = format_objects(
                _bind_to_enclosing_slice(placed), base if traces[rank].meta.get("clock") == "epoch" else 0
            )
            if lines.len():
                file.write(separator + join_lines(lines))
        file.write(b"\n]}\n")


def _build_overlay(traces: dict[int, Trace], first: int) -> dict[int, pl.DataFrame]:
    from etloom.exports.chrome.critical_path_overlay import (
        build_critical_path_arrows,  # only an overlay needs the dependency graph
    )

    return build_critical_path_arrows(traces, first)


def _base_time(traces: Iterable[Trace]) -> int:
    """The earliest time on the clock of the epoch; 0 where no rank has that clock."""
    absolute = [one for one in traces if one.meta.get("clock") == "epoch"]
    times = [
        one.table(name)["ts"].min() for one in absolute for name in ("events", "memory", "counters", "flows")
    ]
    return min((time for time in times if isinstance(time, int)), default=0)


def _format_header(traces: dict[int, Trace], base: int) -> bytes:
    """All before the first event; of one rank, with what its own file said."""
    said: dict[str, Any] = {"schemaVersion": 1}
    if len(traces) > 1:
        said |= {"mergedRanks": list(traces)}
    for trace in traces.values() if len(traces) == 1 else ():
        own = {"traceEvents", "baseTimeNanoseconds", "execution_trace"}
        said |= {key: value for key, value in trace.meta.get("header", {}).items() if key not in own}
        said |= {"deviceProperties": trace.meta.get("device_properties", [])}
        said |= {"distributedInfo": trace.meta["distributed"]} if trace.meta.get("distributed") else {}
    said |= {"displayTimeUnit": "ms"} | ({"baseTimeNanoseconds": base} if base else {})
    return json.dumps(said).removesuffix("}").encode() + b',\n"traceEvents": [\n'


def _format_events(
    trace: Trace, lanes: pl.DataFrame, where: pl.DataFrame, rank: int | None, base: int, flow: int
) -> Iterator[pl.Series]:
    """The events of a rank as JSON texts, in pieces. lanes, where: as of `_places`."""
    base = base if trace.meta.get("clock") == "epoch" else 0
    events = trace.events
    first = lanes.filter(pl.col("lane") == 0).drop("lane", "name")
    yield _format_metadata(trace, lanes, rank)
    for start in range(0, events.height, _CHUNK):
        yield _format_slices(trace, events.slice(start, _CHUNK), where, base)
    yield _format_memory(trace.memory, first, base)
    yield _format_counters(trace.counters, first, base)
    yield _format_flows(trace, first, base, None if rank is None else flow)
    yield _format_launch_arrows(trace, where, base, flow + trace.flows["flow"].n_unique())


def _assign_tracks(trace: Trace, rank: int | None, pid: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The lanes of a rank, and id, ts, pid_text, tid_text of its events."""
    placed = trace.events.select("id", "pid", "tid", "ts", "dur").with_columns(
        tracks.assign_sub_tracks(trace.events)
    )
    lanes = tracks.build_track_table(trace, placed, rank, pid)
    where = placed.select("id", "ts", *tracks.TRACK_KEY).join(
        lanes, on=tracks.TRACK_KEY, how="left", nulls_equal=True
    )
    return lanes, where.select("id", "ts", "pid_text", "tid_text")


def _format_metadata(trace: Trace, lanes: pl.DataFrame, rank: int | None) -> pl.Series:
    """What processes and threads are called (ph M)."""
    lines: list[dict[str, Any]] = []
    whole = lanes.unique("pid", keep="first", maintain_order=True)
    pids = {pid: json.loads(text) for pid, text in whole.select("pid", "pid_text").iter_rows()}

    def say(name: str, pid: int, tid: Any, args: dict[str, Any]) -> None:
        lines.append({"ph": "M", "name": name, "pid": pids[pid], "tid": tid, "ts": 0, "args": args})

    told = {row["pid"]: row for row in trace.threads.filter(pl.col("tid").is_null()).iter_rows(named=True)}
    for pid in pids:
        row = told.get(pid, {})
        name = row.get("name")
        if rank is not None:
            say("process_name", pid, 0, {"name": f"rank {rank}: {name or row.get('labels') or pid}"})
            say("process_sort_index", pid, 0, {"sort_index": pids[pid]})
        else:
            for key, value in (("name", name), ("sort_index", row.get("sort_index"))):
                if value is not None:
                    say(f"process_{key}", pid, 0, {key: value})
        if row.get("labels") is not None:
            say("process_labels", pid, 0, {"labels": row["labels"]})
    order = {
        (pid, tid): index for pid, tid, index in trace.threads.select("pid", "tid", "sort_index").iter_rows()
    }
    for pid, tid, _, _, tid_text, name in lanes.iter_rows():
        if name is not None:
            say("thread_name", pid, json.loads(tid_text), {"name": name})
        if order.get((pid, tid)) is not None:
            say("thread_sort_index", pid, json.loads(tid_text), {"sort_index": order[pid, tid]})
    return pl.Series([json.dumps(line) for line in lines], dtype=pl.String)


def _format_slices(trace: Trace, events: pl.DataFrame, where: pl.DataFrame, base: int) -> pl.Series:
    frame = events.join(where.drop("ts"), on="id", how="left", maintain_order="left")
    inside, beside = split_extra_args(frame["args"])
    args = [format_arguments(frame, ARGUMENT_NAMES["events"])]
    for name in ("arguments", "kernels", "syncs", "frames", "comms"):
        if (side := trace.table(name)).height:
            mine = side.join(frame.select(event="id"), on="event", how="semi").unique("event", keep="first")
            said = pl.DataFrame(
                {"id": mine["event"], "said": format_arguments(mine, ARGUMENT_NAMES[name], name)}
            )
            args.append(frame.join(said, on="id", how="left", maintain_order="left")["said"].fill_null(""))
    text = pl.select(pl.concat_str([*args, inside])).to_series()
    return format_objects(frame.with_columns(text.alias("args"), beside.alias("extra")), base)


def _format_memory(memory: pl.DataFrame, lanes: pl.DataFrame, base: int) -> pl.Series:
    frame = memory.join(lanes, on=("pid", "tid"), how="left", nulls_equal=True, maintain_order="left")
    said = {"ph": pl.lit("i"), "name": pl.lit("[memory]"), "cat": pl.lit("cpu_instant_event")}
    inside, beside = split_extra_args(memory["args"])
    args = pl.select(pl.concat_str(format_arguments(memory, MEMORY_ARGUMENT_NAMES), inside)).to_series()
    return format_objects(frame.with_columns(**said, args=args, extra=beside), base)


def _format_counters(counters: pl.DataFrame, lanes: pl.DataFrame, base: int) -> pl.Series:
    processes = lanes.select("pid", "pid_text").unique()
    series, value = (
        quote_texts(counters["series"].cast(pl.String).fill_null("value")),
        counters["value"].cast(pl.String),
    )
    args = pl.select(pl.concat_str(pl.lit(","), series, pl.lit(":"), value)).to_series()
    frame = counters.with_columns(args=args).join(processes, on="pid", how="left", maintain_order="left")
    return format_objects(frame.with_columns(ph=pl.lit("C"), tid_text=pl.lit("0")), base)


def _format_flows(trace: Trace, lanes: pl.DataFrame, base: int, first: int | None) -> pl.Series:
    """The arrows of the file, save those from launch calls, which `_arrows` draws anew.

    first: number the arrows on from it, so that those of several ranks differ.
    """
    flows = trace.flows
    if trace.launches.height:
        flows = flows.filter(pl.col("cat").cast(pl.String).fill_null("") != "ac2g")
    if first is not None:
        flows = flows.with_columns(flow=pl.col("flow").rank("dense").cast(pl.Int64) - 1 + first)
    frame = flows.join(lanes, on=("pid", "tid"), how="left", nulls_equal=True, maintain_order="left")
    return format_objects(_bind_to_enclosing_slice(frame), base)


def _format_launch_arrows(trace: Trace, where: pl.DataFrame, base: int, first: int) -> pl.Series:
    """From each launch call to the device work it caused: both ends of one arrow."""
    arrows = trace.launches.drop_nulls(["launch", "device_event"]).with_row_index("flow", offset=first)
    ends = [
        arrows.select("flow", id=column)
        .join(where, on="id", maintain_order="left")
        .with_columns(ph=pl.lit(ph))
        for column, ph in (("launch", "s"), ("device_event", "f"))
    ]
    frame = pl.concat(ends).with_columns(cat=pl.lit("ac2g"), name=pl.lit("ac2g"))
    return format_objects(_bind_to_enclosing_slice(frame), base)


def _bind_to_enclosing_slice(flows: pl.DataFrame) -> pl.DataFrame:
    """An arrow ends at the slice around its end, not at the next one."""
    return flows.with_columns(extra=pl.when(pl.col("ph").cast(pl.String) == "f").then(pl.lit(',"bp":"e"')))
