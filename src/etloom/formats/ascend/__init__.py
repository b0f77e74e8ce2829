"""Reads Ascend's databases (ascend_pytorch_profiler_<rank>.db), kernel_details.csv and cluster_communication.json.

Read: operators and ranges of PyTorch with shapes, calls of CANN, tasks of NPUs, copies, collectives with their tasks,
ranges of MSTX, steps. Not read, but counted: hardware metrics, memory, call stacks. Tables of kernels have only these.

`etloom.formats.kineto.ascend`, which also reads trace_view.json, decides which tasks are work.

Layout: the description of the data files of torch_npu and msprof (CANN 8).
"""

from __future__ import annotations

import re
from pathlib import Path

from etloom.core.errors import ReadError
from etloom.core.trace import Job, Trace
from etloom.formats.ascend import communication_table, database, kernel_table
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, decompressed_file, open_decompressed
from etloom.formats.io.sqlite_file import MAGIC, SqliteFile, list_tables

_TABLE = re.compile(
    rb'CREATE TABLE (?:IF NOT EXISTS )?[\s"`\[]*(?:CANN_API|PYTORCH_API|COMPUTE_TASK_INFO|TASK)\b'
)
_HEAD_BYTES = 1 << 16


def sniff(head: bytes) -> bool:
    """Return whether a file is a database of Ascend's profiler or its table of kernels, from its first bytes."""
    return is_database(head) or kernel_table.sniff(head) or communication_table.sniff(head)


def is_database(head: bytes) -> bool:
    """Return whether a file is a SQLite database with tables of Ascend's profiler."""
    return head.startswith(MAGIC) and _TABLE.search(head) is not None


def is_in(path: Path) -> bool:
    """Return whether a SQLite file whose first bytes name no table of it has the tables of Ascend's profiler."""
    return list_tables(path) >= database.TABLES


def read(path: Path) -> Trace | Job:
    """Read the recording of one process; a Job if the file has the collectives of several ranks.

    Raises:
        ReadError: The file is not a recording, or contains no events.
        LimitError: The file is too large.
    """
    with open_decompressed(path, _HEAD_BYTES) as stream:
        try:
            head = stream.read(_HEAD_BYTES)
        except DECOMPRESSION_ERRORS:
            head = b""
    if not head.startswith(MAGIC):
        return communication_table.read(path) if communication_table.sniff(head) else kernel_table.read(path)
    with decompressed_file(path, ".db") as plain, SqliteFile.open(plain) as source:
        trace = database.read(source, path)
    if trace.events.is_empty():
        raise ReadError(
            "has no event that can be read",
            where=path,
            remedy="record NPU activity: torch_npu.profiler.ProfilerActivity.NPU",
        )
    return trace
