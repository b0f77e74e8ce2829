"""Nsight Systems: the SQLite and parquetdir exports of a .nsys-rep, and the report itself through nsys.

Read: kernels, whole-graph launches, copies, sets, synchronisations, runtime and driver calls, overhead,
NVTX ranges and marks (PyTorch's op_id and seq, NCCL's payloads), device allocations, GPU metrics, names of
processes, threads and devices. Not read, but counted: OS runtime calls, scheduling, samples, other libraries.

A correlation id is unique within a process only, so each process becomes a Trace of its own; an export of
several is a Job. Tables and columns that a version lacks are empty.
Layout: https://docs.nvidia.com/nsight-systems/UserGuide/index.html (exported data).
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats.io.compression import decompressed_file, open_decompressed
from etloom.formats.nsys import cuda as cuda
from etloom.formats.nsys import nvtx as nvtx
from etloom.formats.nsys import processes as about
from etloom.formats.nsys.containers import ExportFile, ParquetExport, SqliteExport
from etloom.formats.nsys.event_tables import CUPTI, EventTables
from etloom.formats.tables.building import build_trace, sort_events

_SQLITE, _REPORT = b"SQLite format 3\0", b"NVIDIA Tegra Profiler Report"
_EXPORT = ("nsys", "export", "--type=sqlite", "--force-overwrite=true")

_ACTIVITY_READERS: tuple[Callable[[ExportFile], EventTables], ...] = (
    cuda.read_kernels, cuda.read_graphs, cuda.read_memcpys, cuda.read_memsets, cuda.read_syncs, cuda.read_calls, cuda.read_overheads, nvtx.read_ranges,
)  # fmt: skip
_LATEST = 1 << 61
_NOT_ACTIVITY = ("ENUM_", "TARGET_INFO_", "META_DATA_", "ANALYSIS_", "EXPORT_", "NVTX_PAYLOAD", "sqlite_")
_READ = {
    *(CUPTI + kind for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET", "SYNCHRONIZATION")),
    *(CUPTI + kind for kind in ("RUNTIME", "OVERHEAD", "CUDA_EVENT")),
    *("NVTX_EVENTS", "GPU_METRICS", "CUDA_GPU_MEMORY_USAGE_EVENTS"),
    *("StringIds", "PROCESSES", "ThreadNames", "ProcessStreams", "DIAGNOSTIC_EVENT"),
}


def sniff(head: bytes) -> bool:
    """Whether the file is an Nsight report, or SQLite, which no other format of traces is."""
    return head.startswith((_REPORT, _SQLITE))


def sniff_folder(path: Path) -> bool:
    """Whether the folder is an export of ``nsys export --type parquetdir``."""
    return (path / "StringIds.parquet").is_file() or any(path.glob("CUPTI_ACTIVITY_KIND_*.parquet"))


def read(path: Path, *, all_processes: bool = False, export_timeout: float = 1800) -> Trace | Job:
    """The Trace of the one process that used the device, or a Job of all that did.

    all_processes: also make ranks of processes without device work, where another process has some.
    export_timeout: seconds that ``nsys export`` may take for a raw report.

    Raises ReadError for a file that is no export or holds no process, LimitError for a gzip bomb.
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
            with _export_report(plain, path, timeout) as made, SqliteExport.open(made) as source:
                yield source
        else:
            with SqliteExport.open(plain) as source:
                yield source


@contextmanager
def _export_report(report: Path, named: Path, timeout: float) -> Iterator[Path]:
    """The SQLite export of a report, made by nsys in a temporary folder."""
    command = " ".join([*_EXPORT, f"--output={named.stem}.sqlite", str(named)])
    if shutil.which("nsys") is None:
        raise ReadError(
            "a raw Nsight report can be opened only by nsys, which is not on the PATH",
            where=named,
            remedy=f"run where nsys is installed: {command}",
        )
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        out = Path(folder) / "export.sqlite"
        try:
            done = subprocess.run(
                [*_EXPORT, f"--output={out}", str(report.resolve())],
                capture_output=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReadError(f"nsys export failed: {error}", where=named, remedy=f"try: {command}") from None
        if done.returncode or not out.is_file():
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            raise ReadError(
                f"nsys export failed: {said[-1] if said else f'status {done.returncode}'}",
                where=named,
                remedy=f"try: {command}",
            )
        yield out


def _read(source: ExportFile, path: Path, all_processes: bool) -> Trace | Job:
    if not any(
        name == "StringIds" or name.startswith(CUPTI) or name == "NVTX_EVENTS" for name in source.tables
    ):
        raise ReadError("holds no table of an Nsight export", where=path, remedy="export with nsys export")
    header = about.read_meta(source)
    header["files"] = [str(path)]
    base = header["base_ns"]
    parts = [kind(source) for kind in _ACTIVITY_READERS]
    stats = [stat for part in parts for stat in part.stats]
    known = {process: rank for part in parts for process, rank in part.ranks.items()}
    events, sides = _join_tables(parts, base)
    del parts
    events = _repair_events(events, stats)
    chosen = _select_processes(events, all_processes, stats)
    if not chosen:
        others = " ".join(example for *_, example in _count_unread_tables(source) if example)
        raise ReadError(
            "holds no CUDA activity and no NVTX range" + (f" ({others}, not read)" if others else ""),
            where=path,
            remedy="record with nsys profile -t cuda,nvtx",
        )
    ranks, more = about.assign_ranks(source, chosen, known)
    world = max([size for _, size in known.values()], default=len(chosen) if len(chosen) > 1 else None)
    tables = _ProcessTables(
        events,
        sides,
        about.read_threads(source),
        cuda.read_memory(source),
        cuda.read_gpu_metrics(source),
        base,
    )
    del events, sides
    # What holds for the whole file is said once, with the lowest rank.
    first = min(chosen, key=lambda process: (ranks[process] or 0, process))
    stats += [*more, *_count_unread_tables(source), *source.stats]
    traces: dict[int | None, Trace] = {}
    for process in chosen:
        meta = {**header, "rank": ranks[process], "world_size": world, "pid": about.get_pid(process)}
        own = stats if process == first else []
        traces[ranks[process]] = build_trace(tables.of(process, chosen, first), meta, own)
    if len(traces) == 1:
        return next(iter(traces.values()))
    numbered = {rank: trace for rank, trace in traces.items() if rank is not None}
    return Job(numbered, {**header, "world_size": world})


def _join_tables(parts: list[EventTables], base: int) -> tuple[pl.DataFrame, dict[str, pl.DataFrame]]:
    """All events with ``position``, the number of the row in the file, and the side tables keyed by it."""
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
    every = pl.concat(events).with_row_index("position")
    timed = every.with_columns(ts=pl.col("start") + base, dur=pl.col("end") - pl.col("start"))
    return timed, {table: pl.concat(some, how="diagonal_relaxed") for table, some in sides.items()}


def _repair_events(events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Events that have a time, and durations that are none made null."""
    # A sum with the base of the clock must not wrap around: 146 years are enough.
    ended = pl.col("end").fill_null(0).is_between(-_LATEST, _LATEST)
    timed = (pl.col("start").is_between(-_LATEST, _LATEST) & ended).fill_null(False)
    sane = events.select(untimed=(~timed).sum(), negative=(timed & (pl.col("dur") < 0)).sum())
    untimed, negative = sane.row(0)
    stats += [
        Stat("read.nsys_no_time", "data_loss", untimed, "events without a start that can be one"),
        Stat("read.negative_dur", "data_loss", negative, "ended before it began: the duration is null"),
    ]
    kept = events.filter(timed) if untimed else events
    nameless = "events of which neither text nor StringIds gives the name"
    stats.append(Stat("read.nsys_no_name", "data_loss", kept["name"].null_count(), nameless))
    return kept.drop("start", "end").with_columns(dur=pl.when(pl.col("dur") >= 0).then(pl.col("dur")))


def _select_processes(events: pl.DataFrame, all_processes: bool, stats: list[Stat]) -> list[int]:
    """The processes that are ranks: those with device work where any has some, else all."""
    counts = events.group_by("process").agg(pl.len(), working=pl.col("device").is_not_null().any())
    found = counts.filter(pl.col("process").is_not_null()).sort("process")
    working = found.filter("working")
    ranks = found if all_processes or working.is_empty() else working
    idle = found.join(ranks, on="process", how="anti")
    names = ", ".join(f"pid {about.get_pid(process)}" for process in idle["process"])
    lost = counts.filter(pl.col("process").is_null())["len"].sum()
    stats += [
        Stat("read.nsys_no_process", "data_loss", int(lost), "events that do not say their process"),
        Stat(
            "read.nsys_idle_process",
            "data_loss",
            int(idle["len"].sum()),
            f"no device work in {names}: all_processes=True",
        ),
    ]
    return ranks["process"].to_list()


def _count_unread_tables(source: ExportFile) -> list[Stat]:
    others = {
        table: source.height(table)
        for table in sorted(source.tables)
        if table not in _READ and not table.startswith(_NOT_ACTIVITY)
    }
    rows = {table: count for table, count in others.items() if count}
    if not rows:
        return []
    example = ", ".join(f"{table} {count:,}" for table, count in rows.items())
    return [Stat("read.nsys_table_not_read", "info", sum(rows.values()), f"rows in {example}")]


class _ProcessTables:
    """Cuts the tables of the whole file into those of a process."""

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

    def of(self, process: int, ranks: list[int], first: int) -> dict[str, pl.DataFrame]:
        mine = sort_events(self._events.filter(pl.col("process") == process).drop("process")).with_row_index(
            "id"
        )
        tables = {"events": mine, "threads": self._threads_of(process, mine)}
        where = mine.select("position", event="id")
        for table, side in self._sides.items():
            rows = side.join(where, on="position", how="inner").drop("position").sort("event")
            if rows.height:
                tables[table] = rows.with_row_index("id") if table == "comms" else rows
        for table, whole in {
            "memory": self._memory,
            "counters": self._counters(process, ranks, first),
        }.items():
            rows = (
                whole.filter(pl.col("process") == process).drop("process")
                if "process" in whole.columns
                else whole
            )
            if rows.height:
                tables[table] = rows.sort("ts", maintain_order=True).with_row_index("id")
        return tables

    def _threads_of(self, process: int, events: pl.DataFrame) -> pl.DataFrame:
        own = self._threads.filter(pl.col("process") == process).drop("process")
        return pl.concat([own, about.build_device_tracks(events)], how="diagonal")

    def _counters(self, process: int, ranks: list[int], first: int) -> pl.DataFrame:
        """Metrics of the GPUs that the process uses; those that no process uses go to the first."""
        if self._metrics.is_empty():
            return self._metrics.drop("gpu")
        used = self._events.filter(pl.col("device").is_not_null()).select("process", "device").unique()
        mine = used.filter(pl.col("process") == process)["device"].to_list()
        anyone = used.filter(pl.col("process").is_in(ranks))["device"].to_list()
        wanted = pl.col("gpu").is_in(mine)
        if process == first:
            wanted = wanted | ~pl.col("gpu").is_in(anyone)
        return self._metrics.filter(wanted).drop("gpu")
