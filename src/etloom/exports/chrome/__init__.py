"""Write Chrome trace JSON in Kineto's layout, for Perfetto (https://ui.perfetto.dev), chrome://tracing and HTA.

For one rank, processes, threads and times are as recorded, so the file reads back to the same events. For several
ranks, each process gets a number of its own and is named after its rank; the file lists them in ``mergedRanks``, and is
meant for viewing, not for reading back. Slices that overlap without nesting are moved to sub-tracks, because Perfetto
drops them. An arrow connects each launch call with its GPU work. Counters show the memory of a memory snapshot:
reserved, allocated and requested bytes of each device. Tables of an execution trace alone (nodes, tensors) have no
times and are left out.

Format: Trace Event Format, with the names of Kineto's output_json.cpp. ts and dur are decimal microseconds, exact to
the nanosecond, relative to ``baseTimeNanoseconds`` where times are since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom.core.categories import DEVICE_CATEGORIES, HOST_CATEGORIES, mask_events
from etloom.core.errors import AnalysisError, EtloomError, UnknownName
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
from etloom.linker.selection import drop_captured_events
from etloom.timeline.memory.program import find_programs

SUFFIX = (".json", ".json.gz")
_CHUNK_EVENTS = 1 << 16
OVERLAYS = ("critical-path",)
_ANY = -1
"""Kineto's stream of a wait for a whole device, and of an event that was recorded before the trace."""


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    overlay: Annotated[str | None, "Critical-path draws the critical path as arrows."] = None,
) -> None:
    """Write a Trace or a Job to one Chrome trace JSON file; compressed if its name ends in .gz.

    Raises:
        EtloomError: The trace has no timed events.
    """
    traces = prepare_ranks(trace, path, overlay)
    base = base_time(traces.values())
    with open_atomic(Path(path)) as file:
        file.write(_format_header(traces, base))
        separator = b""
        for lines in _format_job(traces, base, overlay=overlay is not None):
            if lines.len():
                file.write(separator + join_lines(lines))
                separator = b",\n"
        file.write(b"\n]}\n")


def prepare_ranks(trace: Trace | Job, path: str | PathLike[str], overlay: str | None) -> dict[int, Trace]:
    """Return the ranks of a timeline, with counters of allocators.

    Raises:
        UnknownName: The overlay is not one of `OVERLAYS`.
        EtloomError: No rank has timed events.
    """
    if overlay is not None and overlay not in OVERLAYS:
        raise UnknownName("overlay", overlay, list(OVERLAYS), option="overlay")
    traces = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    traces = {
        rank: add_memory_counters(drop_captured_events(rank_trace)) for rank, rank_trace in traces.items()
    }
    if not any(rank_trace.events.height + rank_trace.counters.height for rank_trace in traces.values()):
        raise EtloomError("the trace has no timed events to draw", where=path, remedy="export it as Parquet")
    return traces


def add_memory_counters(trace: Trace) -> Trace:
    """Return the trace with a counter of each device whose allocator's history was recorded, in bytes.

    Its series are reserved, allocated and requested, a row where a value changes. The times of a snapshot count from
    the epoch: without a common clock, or with a damaged history, the trace is returned as it is.
    """
    if not trace.allocator.height or trace.meta.get("clock") != "epoch":
        return trace
    try:
        programs = find_programs(trace)
    except AnalysisError:
        return trace
    on_device = trace.events.filter(pl.Series(mask_events(trace.events, DEVICE_CATEGORIES)))
    processes = dict(on_device.select("device", "pid").unique("device", keep="first").iter_rows())
    tables = [trace.counters]
    for program in programs:
        simulation = program.run()
        for series in ("reserved", "allocated", "requested"):
            rows = pl.DataFrame({"ts": program.time, "value": getattr(simulation, series)}).drop_nulls("ts")
            rows = rows.unique("ts", keep="last", maintain_order=True).filter(
                (pl.col("value") != pl.col("value").shift(1)).fill_null(True)
            )
            tables.append(
                rows.with_columns(
                    pl.lit(processes.get(program.device, -1), pl.Int64).alias("pid"),
                    pl.lit(f"GPU {program.device} memory (B)", pl.Categorical).alias("name"),
                    pl.lit(series, pl.Categorical).alias("series"),
                    pl.col("value").cast(pl.Float64),
                )
            )
    counters = pl.concat(tables, how="diagonal_relaxed").sort("ts", maintain_order=True)
    ids = pl.int_range(counters.height, dtype=pl.UInt32, eager=True).alias("id")
    return trace.replace(counters=counters.with_columns(ids))


def format_ranks(
    traces: dict[int, Trace], base: int, *, with_flow_ids: bool = False, is_numbered: bool = False
) -> Iterator[RankFormatter]:
    """Yield a formatter of each rank. Processes and arrows are numbered consecutively over the ranks. Processes are
    named after their rank if there are several ranks or ``is_numbered`` is set."""
    first_pid, first_flow = 1, 1
    for rank, trace in traces.items():
        number = rank if is_numbered or len(traces) > 1 else None
        yield RankFormatter.create(trace, number, base, first_pid, first_flow, with_flow_ids)
        first_pid += len(tracks.list_processes(trace))
        first_flow += trace.launches.height + trace.flows["flow"].n_unique()


def _format_job(traces: dict[int, Trace], base: int, *, overlay: bool) -> Iterator[pl.Series]:
    """Yield the events of all ranks as JSON texts, in chunks."""
    positions = {}
    last = 1
    for rank, formatter in zip(traces, format_ranks(traces, base), strict=True):
        yield from formatter.format_all()
        if overlay:
            positions[rank] = formatter.positions
            last = formatter.last_flow
    if overlay:
        # Imported here, because only an overlay needs the dependency graph.
        from etloom.exports.chrome.graph_overlays import build_critical_path_arrows

        for rank, ends in build_critical_path_arrows(traces, last).items():
            arrows = ends.join(positions[rank].drop("ts"), on="id", maintain_order="left")
            yield format_objects(_bind_to_enclosing_slice(arrows), relative_base(traces[rank], base))


def base_time(traces: Iterable[Trace]) -> int:
    """Return the time that counts as zero in the file: the earliest one in the traces whose times count from the epoch,
    ns; 0 if there are none.

    If events without duration begin there, it is 1 us before, because several events without time and duration are
    taken for a recorder's unknown times.
    """
    dated = [trace for trace in traces if trace.meta.get("clock") == "epoch"]
    tables = [trace.table(name) for trace in dated for name in ("events", "memory", "counters", "flows")]
    base = min((time for table in tables if isinstance(time := table["ts"].min(), int)), default=0)
    is_instant = (pl.col("ts") == base) & (pl.col("dur") == 0)
    has_instants = any(trace.events.select(is_instant.any()).item() for trace in dated)
    return base - 1000 if has_instants and base > 1000 else base


def relative_base(trace: Trace, base: int) -> int:
    return base if trace.meta.get("clock") == "epoch" else 0


def describe_rank(trace: Trace) -> dict[str, Any]:
    """Return the members of a file next to its events, as they were in the rank's original file."""
    meta = trace.meta
    excluded = {"traceEvents", "baseTimeNanoseconds", "execution_trace"}
    header: dict[str, Any] = {"schemaVersion": 1}
    header |= {key: value for key, value in meta.get("header", {}).items() if key not in excluded}
    header |= {"deviceProperties": meta.get("device_properties", [])}
    distributed = meta.get("distributed") or ({} if trace.rank is None else {"rank": trace.rank})
    return header | ({"distributedInfo": distributed} if distributed else {})


def _format_header(traces: dict[int, Trace], base: int) -> bytes:
    """Format the JSON before the first event; for a single rank it includes the members of its original file."""
    is_merged = len(traces) > 1
    header: dict[str, Any] = {"schemaVersion": 1, "mergedRanks": list(traces)} if is_merged else {}
    header = header or describe_rank(next(iter(traces.values())))
    header |= {"displayTimeUnit": "ms"} | ({"baseTimeNanoseconds": base} if base else {})
    return json.dumps(header).removesuffix("}").encode() + b',\n"traceEvents": [\n'


@dataclass(frozen=True)
class RankFormatter:
    """Formats the events of one rank as JSON texts.

    Attributes:
        trace: The trace.
        rank: Its rank in a file of several ranks, else None.
        base: Time in ns that is subtracted from all times.
        first_flow: Number of the first arrow.
        track_table: Process, thread, sub-track and their texts in the file, from `tracks.build_track_table`.
        positions: id, ts, pid_text and tid_text of each event.
        with_flow_ids: State launches as flow ids of slices instead of arrows, and the track of each sub-track, as
            Perfetto's own format has them.
    """

    trace: Trace
    rank: int | None
    base: int
    first_flow: int
    track_table: pl.DataFrame
    positions: pl.DataFrame
    with_flow_ids: bool = False

    @classmethod
    def create(
        cls,
        trace: Trace,
        rank: int | None,
        base: int,
        first_pid: int,
        first_flow: int,
        with_flow_ids: bool = False,
    ) -> RankFormatter:
        """Create a formatter for a rank, and assign the rank's events to tracks (threads and streams).

        ``first_pid``: number of the first process, in a file of several ranks.
        """
        events = trace.events.select("id", "pid", "tid", "ts", "dur")
        events = events.with_columns(tracks.assign_sub_tracks(trace.events))
        track_table = tracks.build_track_table(trace, events, rank, first_pid)
        positions = events.select("id", "ts", *tracks.TRACK_KEY).join(
            track_table, on=tracks.TRACK_KEY, how="left", nulls_equal=True
        )
        return cls(
            trace,
            rank,
            relative_base(trace, base),
            first_flow,
            track_table,
            positions.select("id", "ts", "pid_text", "tid_text"),
            with_flow_ids,
        )

    def format_all(self) -> Iterator[pl.Series]:
        """Yield all events of the rank as JSON texts, in chunks: metadata, slices, memory, counters and arrows."""
        events = self.trace.events
        yield self.format_metadata()
        for start in range(0, events.height, _CHUNK_EVENTS):
            yield self.format_slices(events.slice(start, _CHUNK_EVENTS))
        yield self.format_memory()
        yield self.format_counters()
        yield self.format_flows()
        if not self.with_flow_ids:
            yield self.format_launch_arrows()

    @property
    def last_flow(self) -> int:
        """The number after that of the last arrow."""
        return self.first_flow + self.trace.launches.height + self.trace.flows["flow"].n_unique()

    @property
    def main_tracks(self) -> pl.DataFrame:
        """The tracks of threads and streams, without the sub-tracks for overlapping slices."""
        return self.track_table.filter(pl.col("sub_track") == 0).drop("sub_track", "name")

    def format_metadata(self) -> pl.Series:
        """Format the names and sort order of processes and threads as metadata events (ph M)."""
        lines: list[dict[str, Any]] = []
        pids = {
            pid: json.loads(text)
            for pid, text in self.track_table.unique("pid", keep="first", maintain_order=True)
            .select("pid", "pid_text")
            .iter_rows()
        }

        def add(name: str, pid: int, tid: Any, args: dict[str, Any]) -> None:
            lines.append({"ph": "M", "name": name, "pid": pids[pid], "tid": tid, "ts": 0, "args": args})

        process_rows = self.trace.threads.filter(pl.col("tid").is_null()).iter_rows(named=True)
        processes = {row["pid"]: row for row in process_rows}
        devices = self._list_device_processes() if self.rank is not None else {}
        for pid in pids:
            row = processes.get(pid, {})
            name = row.get("name")
            if self.rank is not None:
                label = name or row.get("labels") or devices.get(pid)
                label = label or ("other events" if pid is None or pid < 0 else f"process {pid}")
                add("process_name", pid, 0, {"name": f"rank {self.rank}: {label}"})
                add("process_sort_index", pid, 0, {"sort_index": pids[pid]})
            else:
                for key, value in (("name", name), ("sort_index", row.get("sort_index"))):
                    if value is not None:
                        add(f"process_{key}", pid, 0, {key: value})
            if row.get("labels") is not None:
                add("process_labels", pid, 0, {"labels": row["labels"]})
        main_tids = {(pid, tid): json.loads(text) for pid, tid, _, text in self.main_tracks.iter_rows()}
        thread_rows = self.trace.threads.select("pid", "tid", "sort_index").iter_rows()
        order = {(pid, tid): index for pid, tid, index in thread_rows}
        for pid, tid, sub_track, _, tid_text, name in self.track_table.iter_rows():
            if sub_track and self.with_flow_ids:
                add("thread_parent", pid, json.loads(tid_text), {"parent": main_tids[pid, tid]})
            if name is not None:
                add("thread_name", pid, json.loads(tid_text), {"name": name})
            if order.get((pid, tid)) is not None:
                add("thread_sort_index", pid, json.loads(tid_text), {"sort_index": order[pid, tid]})
        return pl.Series([json.dumps(line) for line in lines], dtype=pl.String)

    def _list_device_processes(self) -> dict[int, str]:
        """Return {process id: "GPU n"} for processes that have GPU activity and no host events."""
        is_host = pl.Series(mask_events(self.trace.events, HOST_CATEGORIES))
        events = self.trace.events.select("pid", "device", is_host=is_host).drop_nulls("pid")
        by_process = events.group_by("pid").agg(pl.col("device").min(), pl.col("is_host").any())
        devices = by_process.filter(~pl.col("is_host")).drop_nulls("device")
        return {pid: f"GPU {device}" for pid, device in devices.select("pid", "device").rows()}

    def format_slices(self, events: pl.DataFrame) -> pl.Series:
        """Format rows of the table `events` as slices; related rows of other tables become their arguments."""
        frame = events.join(self.positions.drop("ts"), on="id", how="left", maintain_order="left")
        extra_args, members = split_extra_args(frame["args"])
        is_wait = pl.col("id").is_in(self.trace.syncs.drop_nulls("kind")["event"].implode())
        any_stream = pl.when(is_wait).then(pl.col("stream").fill_null(_ANY)).otherwise("stream")
        args = [format_arguments(frame.with_columns(stream=any_stream), ARGUMENT_NAMES["events"])]
        for name in ("arguments", "kernels", "syncs", "frames", "comms"):
            table = self.trace.table(name)
            if name == "syncs":
                table = table.with_columns(
                    pl.when(pl.col("wait_event").is_not_null())
                    .then(pl.col(column).fill_null(_ANY))
                    .otherwise(column)
                    for column in ("wait_stream", "record_correlation")
                    if table[column].count()  # else the recorder does not write it
                )
            if not table.height:
                continue
            rows = table.join(frame.select(event="id"), on="event", how="semi").unique("event", keep="first")
            texts = pl.DataFrame(
                {"id": rows["event"], "text": format_arguments(rows, ARGUMENT_NAMES[name], name)}
            )
            joined = frame.select("id").join(texts, on="id", how="left", maintain_order="left")
            args.append(joined["text"].fill_null(""))
        text = pl.select(pl.concat_str([*args, extra_args])).to_series()
        if self.with_flow_ids:
            members = pl.select(pl.concat_str(members, *self._format_flow_ids(frame["id"]))).to_series()
        return format_objects(frame.with_columns(text.alias("args"), members.alias("extra")), self.base)

    def _format_flow_ids(self, ids: pl.Series) -> Iterator[pl.Series]:
        """Yield the flows that begin, and those that end, at each event, as JSON members."""
        for member, column in (("flow_ids", "launch"), ("terminating_flow_ids", "device_event")):
            numbers = self._launches.group_by(column).agg(pl.col("flow").cast(pl.String).str.join(","))
            text = pl.concat_str(pl.lit(f',"{member}":['), pl.col("flow"), pl.lit("]"))
            joined = pl.DataFrame({column: ids}).join(numbers, on=column, how="left", maintain_order="left")
            yield joined.select(text.fill_null("")).to_series()

    def format_memory(self) -> pl.Series:
        """Format the table `memory` as instant events (ph i)."""
        memory = self.trace.memory
        frame = self._join_tracks(memory)
        constants = {"ph": pl.lit("i"), "name": pl.lit("[memory]"), "cat": pl.lit("cpu_instant_event")}
        extra_args, members = split_extra_args(memory["args"])
        text = pl.concat_str(format_arguments(memory, MEMORY_ARGUMENT_NAMES), extra_args)
        args = pl.select(text).to_series()
        return format_objects(frame.with_columns(**constants, args=args, extra=members), self.base)

    def format_counters(self) -> pl.Series:
        """Format the table `counters` as counter events (ph C)."""
        counters = self.trace.counters
        processes = self.main_tracks.select("pid", "pid_text").unique()
        series = quote_texts(counters["series"].cast(pl.String).fill_null("value"))
        value = counters["value"].cast(pl.String)
        args = pl.select(pl.concat_str(pl.lit(","), series, pl.lit(":"), value)).to_series()
        frame = counters.with_columns(args=args).join(
            processes, on="pid", how="left", nulls_equal=True, maintain_order="left"
        )
        return format_objects(frame.with_columns(ph=pl.lit("C"), tid_text=pl.lit("0")), self.base)

    def format_flows(self) -> pl.Series:
        """Format the recorded flow arrows, except those of launch calls; see `format_launch_arrows`.

        For a rank of several, the arrows are renumbered from ``first_flow``.
        """
        flows = self.trace.flows
        if self.trace.launches.height:
            flows = flows.filter(pl.col("cat").cast(pl.String).fill_null("") != "ac2g")
        if self.rank is not None:
            flows = flows.with_columns(flow=pl.col("flow").rank("dense").cast(pl.Int64) - 1 + self.first_flow)
        frame = _bind_to_enclosing_slice(self._join_tracks(flows))
        args, members = split_extra_args(flows["args"])
        return format_objects(
            frame.with_columns(args=args, extra=pl.concat_str(members, "extra", ignore_nulls=True)), self.base
        )

    @cached_property
    def _launches(self) -> pl.DataFrame:
        """The launches of GPU activity, with the number of the arrow (flow)."""
        first = self.first_flow + self.trace.flows["flow"].n_unique()
        launches = self.trace.launches.drop_nulls(["launch", "device_event"])
        return launches.select("launch", "device_event").with_row_index("flow", offset=first)

    def format_launch_arrows(self) -> pl.Series:
        """Format an arrow from each launch call to the GPU work it launched."""
        ends = [
            self._launches.select("flow", id=column)
            .join(self.positions, on="id", maintain_order="left")
            .with_columns(ph=pl.lit(ph))
            for column, ph in (("launch", "s"), ("device_event", "f"))
        ]
        frame = pl.concat(ends).with_columns(cat=pl.lit("ac2g"), name=pl.lit("ac2g"))
        return format_objects(_bind_to_enclosing_slice(frame), self.base)

    def _join_tracks(self, table: pl.DataFrame) -> pl.DataFrame:
        return table.join(
            self.main_tracks, on=("pid", "tid"), how="left", nulls_equal=True, maintain_order="left"
        )


def _bind_to_enclosing_slice(flows: pl.DataFrame) -> pl.DataFrame:
    """Add ``"bp":"e"`` to arrow ends, so that viewers attach them to the enclosing slice instead of the next slice."""
    is_end = pl.col("ph").cast(pl.String) == "f"
    return flows.with_columns(extra=pl.when(is_end).then(pl.lit(',"bp":"e"')))
