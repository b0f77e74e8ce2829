"""Recordings of AMD's profilers: rocprofv3's databases (rocpd), JSON and CSV, and rocmProfileData's .rpd.

Supported: kernels, memory copies and fills, calls of HIP and HSA, ranges and marks (roctx, RCCL), devices, streams and
queues. Not read, but counted: counters, samples of the program counter, allocations, arguments of calls.

Times are those of the machine since it was started. Each process with GPU activity becomes a rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, NamedTuple

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats.io.compression import (
    DECOMPRESSION_ERRORS,
    SizeLimit,
    decompressed_file,
    open_decompressed,
)
from etloom.formats.io.sqlite_file import MAGIC, SqliteFile, list_tables
from etloom.formats.rocprof import rocpd, rpd, tool_json, trace_csv
from etloom.formats.rocprof.activities import Process, build_run

_HEAD_BYTES = 1 << 16
_NSIGHT = (b"StringIds", b"CUPTI_ACTIVITY_KIND_", b"NVTX_EVENTS")
_TABLE = re.compile(rb'CREATE TABLE (?:IF NOT EXISTS )?[\s"`\[]*rocpd_')


def sniff(head: bytes) -> bool:
    """Return whether a file is a recording of one of AMD's profilers, judging from its first bytes ``head``."""
    return is_database(head) or tool_json.sniff(head) or trace_csv.sniff(head)


def sniff_folder(path: Path) -> bool:
    """Return whether a folder holds rocprofv3's CSV files, and no other trace."""
    return trace_csv.sniff_folder(path)


def is_database(head: bytes) -> bool:
    """Return whether a file is a SQLite database with the tables of AMD's profilers."""
    return head.startswith(MAGIC) and _TABLE.search(head) is not None


def is_in(path: Path) -> bool:
    """Return whether a SQLite file whose first bytes name no table of Nsight has the tables of AMD's profilers."""
    with open_decompressed(path, _HEAD_BYTES) as stream:
        head = stream.read(_HEAD_BYTES)
    if any(name in head for name in _NSIGHT):
        return False
    return any(table.startswith("rocpd_") for table in list_tables(path))


def read(
    path: Path,
    *,
    all_processes: Annotated[
        bool, "Also read processes without GPU activities as ranks, if another process has some."
    ] = False,
    limit: SizeLimit = 4 << 30,
) -> Trace | Job:
    """Read a recording as a Trace if one process used a GPU, or as a Job with a Trace per process if several did.

    Raises:
        ReadError: If the file is not a recording, or contains no events.
        LimitError: If the file is too large.
    """
    content = _read_content(path, limit)
    if not any(process.calls.height or process.activities.height for process in content.processes):
        raise ReadError(
            f"has no event that can be read; {content.tool} wrote it",
            where=path,
            remedy="record kernels and calls: rocprofv3 --runtime-trace -- COMMAND",
        )
    header = {"files": [str(path)], "schema_version": content.version, "header": {"product": content.tool}}
    return build_run(content.processes, header, content.stats, all_processes=all_processes)


class _Content(NamedTuple):
    tool: str
    version: str | None
    processes: list[Process]
    stats: list[Stat]


def _read_content(path: Path, limit: int) -> _Content:
    if path.is_dir():
        return _Content("rocprofv3", None, *trace_csv.read_processes(path))
    with open_decompressed(path, _HEAD_BYTES) as stream:
        try:
            head = stream.read(_HEAD_BYTES)
        except DECOMPRESSION_ERRORS:
            head = b""
    if head.startswith(MAGIC):
        return _read_database(path)
    if trace_csv.sniff(head):
        return _Content("rocprofv3", None, *trace_csv.read_processes(path))
    return _Content("rocprofv3", None, *tool_json.read_processes(path, limit))


def _read_database(path: Path) -> _Content:
    with decompressed_file(path, ".db") as plain, SqliteFile.open(plain) as source:
        is_rpd = frozenset(source.tables) >= rpd.TABLES
        if not is_rpd and not rocpd.list_recordings(source):
            raise ReadError(
                "has no table of rocprofv3 or rocmProfileData",
                where=path,
                remedy="record again with rocprofv3 -r",
            )
        form, tool = (rpd, "rocmProfileData") if is_rpd else (rocpd, "rocprofv3")
        processes, stats = form.read_processes(source)
        return _Content(tool, form.read_version(source), processes, stats)


def find_rank(path: Path) -> int | None:
    """Return the rank in the environment that a database of rocprofv3 states, or None. Raises ReadError."""
    with open_decompressed(path, _HEAD_BYTES) as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            return None
    with decompressed_file(path, ".db") as plain, SqliteFile.open(plain) as source:
        return rocpd.find_rank_of(source)
