"""Reads Nsight Systems' SQLite and parquetdir exports of a .nsys-rep, and the .nsys-rep itself through nsys.

Supported: kernels, whole-graph launches, memcpy, memset, synchronization, runtime and driver calls, overhead,
NVTX ranges and marks (PyTorch's op_id and seq, NCCL's payloads), device allocations, GPU metrics, names of
processes, threads and devices. Not read, but counted: OS runtime calls, scheduling, samples, other libraries.

A correlation id is unique within a process only, so each process becomes a Trace; an export with several processes is
a Job. Tables and columns that a version of Nsight does not write are empty.
Layout: https://docs.nvidia.com/nsight-systems/UserGuide/index.html (exported data).
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import polars as pl

from etloom.core.categories import RUNTIME_CATEGORIES
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats import ascend, rocprof
from etloom.formats.io.compression import decompressed_file, open_decompressed
from etloom.formats.io.other_formats import identify
from etloom.formats.io.sqlite_file import MAGIC
from etloom.formats.nsys import cuda as cuda
from etloom.formats.nsys import nvtx as nvtx
from etloom.formats.nsys import processes as about
from etloom.formats.nsys.containers import I64, TEXT, ExportFile, ParquetExport, SqliteExport
from etloom.formats.nsys.event_tables import CUPTI, EventTables
from etloom.formats.tables.building import build_trace, sort_events
from etloom.formats.tables.processes import build_device_tracks
from etloom.formats.tables.recorder_problems import LOSS_WORDS, state_problems

_REPORT = b"NVIDIA Tegra Profiler Report"
_EXPORT = ("nsys", "export", "--type=sqlite", "--force-overwrite=true")

_ACTIVITY_READERS: tuple[Callable[[ExportFile], EventTables], ...] = (
    cuda.read_kernels,
    cuda.read_graphs,
    cuda.read_memcpys,
    cuda.read_memsets,
    cuda.read_syncs,
    cuda.read_calls,
    cuda.read_overheads,
    nvtx.read_ranges,
)
_MAIN_TABLES = ("StringIds", "NVTX_EVENTS")
_LATEST = 1 << 61
_WARNING = 2
"""Severity of Nsight's messages from which they are warnings and errors."""
_NOT_ACTIVITY = ("ENUM_", "TARGET_INFO_", "META_DATA_", "ANALYSIS_", "EXPORT_", "NVTX_PAYLOAD", "sqlite_")
_READ_TABLES = {
    *(CUPTI + kind for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET", "SYNCHRONIZATION")),
    *(CUPTI + kind for kind in ("RUNTIME", "OVERHEAD", "CUDA_EVENT")),
    *("NVTX_EVENTS", "GPU_METRICS", "CUDA_GPU_MEMORY_USAGE_EVENTS"),
    *("StringIds", "PROCESSES", "ThreadNames", "ProcessStreams", "DIAGNOSTIC_EVENT"),
}


def sniff(head: bytes) -> bool:
    """Return whether a file is an Nsight report or a SQLite database, judging from its first bytes ``head``.

    The tables of an export may begin after these bytes; only databases of AMD's and Ascend's profilers are known by
    them.
    """
    others = rocprof.is_database(head) or ascend.is_database(head)
    return head.startswith(_REPORT) or (head.startswith(MAGIC) and not others)


def sniff_folder(path: Path) -> bool:
    """Return whether a folder is an export of ``nsys export --type parquetdir``."""
    return (path / "StringIds.parquet").is_file() or any(path.glob("CUPTI_ACTIVITY_KIND_*.parquet"))


def read(
    path: Path,
    *,
    all_processes: Annotated[
        bool, "Also read processes without GPU activities as ranks, if another process has some."
    ] = False,
    export_timeout: Annotated[float, "Seconds that nsys export may take for a raw report."] = 1800,
) -> Trace | Job:
    """Read a report as a Trace if one process used the GPU, or as a Job with a Trace per process if several did.

    Raises:
        ReadError: If the file is not an export, or has no process to read.
        LimitError: For a decompression bomb.
    """
    with _open_export(path, export_timeout) as source:
        return _read(source, path, all_processes)


@contextmanager
def _open_export(path: Path, timeout: float) -> Iterator[ExportFile]:
    if path.is_dir():
        yield ParquetExport(path)
        return
    with open_decompressed(path) as stream:
        head = stream.read(len(_REPORT))
    with decompressed_file(path, ".nsys-rep" if head == _REPORT else ".sqlite") as plain:
        if head == _REPORT:
            with _export_report(plain, path, timeout) as export, SqliteExport.open(export) as source:
                yield source
        else:
            with SqliteExport.open(plain) as source:
                yield source


@contextmanager
def _export_report(report: Path, named: Path, timeout: float) -> Iterator[Path]:
    """Run ``nsys export`` on a report, and yield the path of the SQLite file in a temporary folder."""
    command = " ".join([*_EXPORT, f"--output={named.stem}.sqlite", str(named)])
    if shutil.which("nsys") is None:
        raise ReadError(
            "a raw Nsight report can only be opened by nsys, which is not on the PATH",
            where=named,
            remedy=f"run where nsys is installed: {command}",
        )
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        out = Path(folder) / "export.sqlite"
        try:
            completed = subprocess.run(
                [*_EXPORT, f"--output={out}", str(report.resolve())],
                capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReadError(f"nsys export failed: {error}", where=named, remedy=f"try: {command}") from None
        if completed.returncode or not out.is_file():
            output = (completed.stderr or completed.stdout).decode("utf-8", "replace").strip().splitlines()
            raise ReadError(
                f"nsys export failed: {output[-1] if output else f'status {completed.returncode}'}",
                where=named,
                remedy=f"try: {command}",
            )
        yield out


def _read(source: ExportFile, path: Path, all_processes: bool) -> Trace | Job:
    other = identify(tables=source.tables)
    if other is not None or not any(name.startswith((CUPTI, *_MAIN_TABLES)) for name in source.tables):
        reason = (
            "is a SQLite database of no known profiler"
            if other is None
            else f"is {other.name}, which is not read"
        )
        remedy = (
            "open an export of Nsight Systems, rocprofv3, rocmProfileData or Ascend's profiler"
            if other is None
            else other.remedy
        )
        raise ReadError(reason, where=path, remedy=remedy)
    header = about.read_meta(source)
    header["files"] = [str(path)]
    base = header["base_ns"]
    parts = [kind(source) for kind in _ACTIVITY_READERS]
    stats = [stat for part in parts for stat in part.stats]
    nccl_ranks = {process: rank for part in parts for process, rank in part.ranks.items()}
    events, sides = _join_tables(parts, base)
    del parts
    events = _repair_events(_infer_processes(events, stats), stats)
    selected = _select_processes(events, all_processes, stats)
    if not selected:
        others = " ".join(example for *_, example in _count_unread_tables(source) if example)
        raise ReadError(
            "has no CUDA activity and no NVTX range" + (f" ({others}, not read)" if others else ""),
            where=path,
            remedy="record with nsys profile -t cuda,nvtx",
        )
    ranks, more = about.assign_ranks(source, selected, nccl_ranks)
    world = max(
        [size for _, size in nccl_ranks.values()], default=len(selected) if len(selected) > 1 else None
    )
    tables = _ProcessTables(
        events,
        sides,
        about.read_threads(source),
        cuda.read_memory(source),
        cuda.read_gpu_metrics(source),
        base,
    )
    del events, sides
    # The stats of the whole file go to the lowest rank only.
    first = min(selected, key=lambda process: (ranks[process] or 0, process))
    stats += [*more, *_read_diagnostics(source), *_count_unread_tables(source), *source.stats]
    traces: dict[int | None, Trace] = {}
    for process in selected:
        meta = {**header, "rank": ranks[process], "world_size": world, "pid": about.get_pid(process)}
        rank_stats = stats if process == first else []
        traces[ranks[process]] = build_trace(tables.select(process, selected, first), meta, rank_stats)
    if len(traces) == 1:
        return next(iter(traces.values()))
    numbered = {rank: trace for rank, trace in traces.items() if rank is not None}
    return Job(numbered, {**header, "world_size": world})


def _join_tables(parts: list[EventTables], base: int) -> tuple[pl.DataFrame, dict[str, pl.DataFrame]]:
    """Concatenate the events of all activities, and related rows of other tables, keyed by event row (``position``)."""
    offset = 0
    events: list[pl.DataFrame] = []
    sides: dict[str, list[pl.DataFrame]] = {}
    for part in parts:
        events.append(part.events)
        for table, side in part.sides.items():
            sides.setdefault(table, []).append(
                side.with_columns(position=(pl.col("row") + offset).cast(pl.UInt32)).drop("row")
            )
        offset += part.events.height
    all_events = pl.concat(events).with_row_index("position")
    timed = all_events.with_columns(ts=pl.col("start") + base, dur=pl.col("end") - pl.col("start"))
    return timed, {table: pl.concat(frames, how="diagonal_relaxed") for table, frames in sides.items()}


def _infer_processes(events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Assign events without a globalPid to the only process, or to the process whose call launched them.

    If nothing states a process, all events are of process 0.
    """
    stateless = events["process"].null_count()
    if not stateless:
        return events
    processes = events["process"].drop_nulls().unique()
    if len(processes) < 2:
        only = int(processes[0]) if len(processes) else 0
        process = events["process"].fill_null(only)
    else:
        calls = events.filter(
            pl.col("cat").cast(pl.String).is_in(list(RUNTIME_CATEGORIES)) & (pl.col("correlation") > 0)
        )
        callers = (
            calls.select("correlation", caller="process")
            .drop_nulls()
            .unique()
            .unique("correlation", keep="none")
        )
        launched = events.select("correlation").join(
            callers, on="correlation", how="left", maintain_order="left"
        )
        process = events["process"].fill_null(launched["caller"])
    stats.append(
        Stat(
            "read.nsys_inferred_process",
            "info",
            stateless - process.null_count(),
            f"assigned to {len(processes) or 1} processes: to the only one, or to that of the call with the same "
            f"correlation",
        )
    )
    return events.with_columns(process.alias("process"))


def _repair_events(events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Drop events without a valid time, and set invalid durations to null."""
    # Times of more than 146 years would overflow when the base of the clock is added.
    ended = pl.col("end").fill_null(0).is_between(-_LATEST, _LATEST)
    timed = (pl.col("start").is_between(-_LATEST, _LATEST) & ended).fill_null(False)
    problem_counts = events.select(untimed=(~timed).sum(), negative=(timed & (pl.col("dur") < 0)).sum())
    untimed, negative = problem_counts.row(0)
    stats += [
        Stat("read.nsys_no_time", "data_loss", untimed, "events without a valid start"),
        Stat("read.negative_dur", "data_loss", negative, "end before start: the duration is null"),
    ]
    valid = events.filter(timed) if untimed else events
    nameless = "events without a name in their text or in StringIds"
    stats.append(Stat("read.nsys_no_name", "data_loss", valid["name"].null_count(), nameless))
    return valid.drop("start", "end").with_columns(dur=pl.when(pl.col("dur") >= 0).then(pl.col("dur")))


def _select_processes(events: pl.DataFrame, all_processes: bool, stats: list[Stat]) -> list[int]:
    """Return the processes to read as ranks: those with GPU activities, or all processes if none has any."""
    counts = events.group_by("process").agg(pl.len(), working=pl.col("device").is_not_null().any())
    processes = counts.filter(pl.col("process").is_not_null()).sort("process")
    working = processes.filter("working")
    ranks = processes if all_processes or working.is_empty() else working
    idle = processes.join(ranks, on="process", how="anti")
    names = ", ".join(f"pid {about.get_pid(process)}" for process in idle["process"])
    lost = counts.filter(pl.col("process").is_null())["len"].sum()
    stats += [
        Stat("read.nsys_no_process", "data_loss", int(lost), "events without a process; skipped"),
        Stat(
            "read.nsys_idle_process",
            "data_loss",
            int(idle["len"].sum()),
            f"skipped processes without GPU activity: {names}; read with all_processes=True",
        ),
    ]
    return ranks["process"].to_list()


def _read_diagnostics(source: ExportFile) -> list[Stat]:
    """Return the warnings and errors of Nsight about its own recording, and what else says that events are missing."""
    rows = source.read_table("DIAGNOSTIC_EVENT", {"severity": I64, "text": TEXT}).drop_nulls("text")
    problems = rows.filter((pl.col("severity") >= _WARNING) | pl.col("text").str.contains(LOSS_WORDS))
    return [state_problems("read.nsys_problem", problems["text"].to_list())]


def _count_unread_tables(source: ExportFile) -> list[Stat]:
    others = {
        table: source.count_rows(table)
        for table in sorted(source.tables)
        if table not in _READ_TABLES and not table.startswith(_NOT_ACTIVITY)
    }
    rows = {table: count for table, count in others.items() if count}
    if not rows:
        return []
    example = ", ".join(f"{table} {count:,}" for table, count in rows.items())
    return [Stat("read.nsys_table_not_read", "info", sum(rows.values()), f"rows in {example}")]


class _ProcessTables:
    """Selects the rows of a process from the tables of the whole file."""

    def __init__(
        self,
        events: pl.DataFrame,
        sides: dict[str, pl.DataFrame],
        threads: pl.DataFrame,
        memory: pl.DataFrame,
        metrics: pl.DataFrame,
        base: int,
    ) -> None:
        self._events = events
        self._sides = sides
        self._threads = threads
        self._memory = memory.with_columns(pl.col("ts") + base)
        self._metrics = metrics.with_columns(pl.col("ts") + base)

    def select(self, process: int, ranks: list[int], first: int) -> dict[str, pl.DataFrame]:
        events = sort_events(
            self._events.filter(pl.col("process") == process).drop("process")
        ).with_row_index("id")
        tables = {"events": events, "threads": self._select_threads(process, events)}
        event_ids = events.select("position", event="id")
        for table, side in self._sides.items():
            rows = side.join(event_ids, on="position", how="inner").drop("position").sort("event")
            if rows.height:
                tables[table] = rows.with_row_index("id") if table == "comms" else rows
        for table, frame in {
            "memory": self._memory,
            "counters": self._select_counters(process, ranks, first),
        }.items():
            rows = (
                frame.filter(pl.col("process").fill_null(first) == process).drop("process")
                if "process" in frame.columns
                else frame
            )
            if rows.height:
                tables[table] = rows.sort("ts", maintain_order=True).with_row_index("id")
        return tables

    def _select_threads(self, process: int, events: pl.DataFrame) -> pl.DataFrame:
        names = self._threads.filter(pl.col("process") == process).drop("process")
        return pl.concat([names, build_device_tracks(events)], how="diagonal")

    def _select_counters(self, process: int, ranks: list[int], first: int) -> pl.DataFrame:
        """Return metrics of the GPUs that the process uses; metrics of unused GPUs go to the first process."""
        if self._metrics.is_empty():
            return self._metrics.drop("gpu")
        used = self._events.filter(pl.col("device").is_not_null()).select("process", "device").unique()
        process_gpus = used.filter(pl.col("process") == process)["device"].to_list()
        used_gpus = used.filter(pl.col("process").is_in(ranks))["device"].to_list()
        selected = pl.col("gpu").is_in(process_gpus)
        if process == first:
            selected = selected | ~pl.col("gpu").is_in(used_gpus)
        return self._metrics.filter(selected).drop("gpu")
