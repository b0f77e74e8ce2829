"""Recordings of AMD's profilers: rocprofv3's databases (rocpd), JSON and CSV, and rocmProfileData's .rpd.

Supported: kernels, memory copies and fills, calls of HIP and HSA, ranges and marks (roctx, RCCL), devices, streams and
queues. Not read, but counted: counters, samples of the program counter, allocations, arguments of calls.

Times are those of the machine since it was started. Each process with GPU activity becomes a rank.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated

from etloom.core.errors import EtloomError, ReadError
from etloom.core.trace import Job, Trace
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, decompressed_file, open_decompressed
from etloom.formats.io.sqlite_file import MAGIC, SqliteFile
from etloom.formats.rocprof import rocpd, rpd
from etloom.formats.rocprof.activities import build_run

_HEAD_BYTES = 1 << 16
_NSIGHT = (b"StringIds", b"CUPTI_ACTIVITY_KIND_", b"NVTX_EVENTS")
_TABLE = re.compile(rb'CREATE TABLE (?:IF NOT EXISTS )?[\s"`\[]*rocpd_')


def sniff(head: bytes) -> bool:
    """Return whether a file is a recording of one of AMD's profilers, judging from its first bytes ``head``."""
    return is_database(head)


def is_database(head: bytes) -> bool:
    """Return whether a file is a SQLite database with the tables of AMD's profilers."""
    return head.startswith(MAGIC) and _TABLE.search(head) is not None


def is_in(path: Path) -> bool:
    """Return whether a SQLite file whose first bytes name no table of Nsight has the tables of AMD's profilers."""
    with open_decompressed(path, _HEAD_BYTES) as stream:
        head = stream.read(_HEAD_BYTES)
    if any(name in head for name in _NSIGHT):
        return False
    with (
        contextlib.suppress(EtloomError, *DECOMPRESSION_ERRORS),
        decompressed_file(path, ".db") as plain,
        SqliteFile.open(plain) as source,
    ):
        return any(table.startswith("rocpd_") for table in source.tables)
    return False


def read(
    path: Path,
    *,
    all_processes: Annotated[
        bool, "Also read processes without GPU activities as ranks, if another process has some."
    ] = False,
) -> Trace | Job:
    """Read a recording as a Trace if one process used a GPU, or as a Job with a Trace per process if several did.

    Raises:
        ReadError: If the file is not a recording, or contains no events.
        LimitError: If the file is too large.
    """
    with decompressed_file(path, ".db") as plain, SqliteFile.open(plain) as source:
        tables = frozenset(source.tables)
        form, tool = (rpd, "rocmProfileData") if tables >= rpd.TABLES else (rocpd, "rocprofv3")
        if form is rocpd and not rocpd.list_recordings(source):
            raise ReadError(
                "has no table of rocprofv3 or rocmProfileData",
                where=path,
                remedy="record again with rocprofv3 -r",
            )
        processes, stats = form.read_processes(source)
        version = form.read_version(source)
    if not any(process.calls.height or process.activities.height for process in processes):
        raise ReadError(
            f"has no event that can be read; {tool} wrote it",
            where=path,
            remedy="record kernels and calls: rocprofv3 --runtime-trace -- COMMAND",
        )
    header = {"files": [str(path)], "schema_version": version, "header": {"product": tool}}
    return build_run(processes, header, stats, all_processes=all_processes)


def find_rank(path: Path) -> int | None:
    """Return the rank in the environment that a database of rocprofv3 states, or None. Raises ReadError."""
    with open_decompressed(path, _HEAD_BYTES) as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            return None
    with decompressed_file(path, ".db") as plain, SqliteFile.open(plain) as source:
        return rocpd.find_rank_of(source)
