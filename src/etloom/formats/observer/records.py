"""Reads the chunks and records of an observer file; only chunks that pass all checks are used.

Layout: docs/observer-format.md and src/etloom/collector/observer/native/format.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etloom import _native
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.formats.io.compression import read_buffer
from etloom.formats.io.json_text import load_json

Words = npt.NDArray[np.uint64]
List = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]
"""Argument lists: the key (stream and number) of the form of each, 0 for none; its first word; its number of words."""
Definitions = dict[tuple[int, int], dict[int, bytes]]
"""(kind, stream) -> id -> bytes; kinds are NAME, LAYOUT, FORM and TEXT."""

MAGIC = b"ETLOBS\r\n"
VERSION = 1
NAME, LAYOUT, FORM, TEXT = 1, 2, 3, 4

_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("chunk_bytes", "<u4"),
        ("detail", "<u4"),
        ("ring", "<u4"),
        ("pid", "<u4"),
        ("max_bytes", "<u8"),
        ("wall_ns", "<i8"),
        ("mono_ns", "<i8"),
        ("chunks", "<u8"),
        ("closed", "<u8"),
        ("counters", "<u8", 24),
        ("torch", "S64"),
        ("host", "S64"),
        ("first_ns", "<i8"),  # 0 in files of the first etloom, and before a window opens
        ("overwritten_ns", "<i8"),
    ]
)
_MAX_HEADER_BYTES = 1 << 20
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1024, 1 << 24
_MAX_FILE_BYTES = 1 << 36


@dataclass
class Records:
    """The records of an observer file: header, operators, argument lists, definitions, notes and recording windows.

    Attributes:
        header: The file's header.
        words: The file after the header, as 64-bit words.
        operators: One value per operator and column, sorted by handle. ``parent`` is the row of the enclosing operator,
            or -1; ``name`` is stream and number of the name.
        lists: The inputs and the outputs of the operators.
        forms: The keys of the forms that lists have, sorted.
        definitions: The first definition of each number.
        notes: Stream, text and handle of each note.
        windows: Of each begin and end of a window, whether it is a begin, and its wall time in ns.
        stats: Rows of stats about damage.
        duplicates: Number of operators with the handle of another one, which are left out.
        ends_without_begin: Number of ends whose begin is not in the file.
        missing_parents: Number of operators whose parent is not in the file.
    """

    header: np.void
    words: Words
    operators: dict[str, npt.NDArray[Any]]
    lists: list[List]
    forms: list[int]
    definitions: Definitions
    notes: list[tuple[int, int, int]]
    windows: list[tuple[bool, int]]
    duplicates: int
    ends_without_begin: int
    missing_parents: int
    stats: list[Stat] = field(default_factory=list)


def load_records(path: Path) -> Records:
    """Read the header and all valid records of an observer file, plain or compressed.

    Raises:
        ReadError: It is not an observer file, has another version or a damaged header.
    """
    data, truncation = read_buffer(path, _MAX_FILE_BYTES)
    if len(data) < _HEADER.itemsize or not data.startswith(MAGIC):
        raise ReadError("not an observer file", where=path)
    header = np.frombuffer(data, _HEADER, 1)[0]
    if header["version"] != VERSION:
        raise ReadError(
            f"unsupported version {header['version']} of the observer format; expected {VERSION}",
            where=path,
            remedy="read it with the etloom that wrote it",
        )
    header_bytes, chunk_bytes = int(header["header_bytes"]), int(header["chunk_bytes"])
    if (
        not _HEADER.itemsize <= header_bytes <= _MAX_HEADER_BYTES
        or not _MIN_CHUNK_BYTES <= chunk_bytes <= _MAX_CHUNK_BYTES
        or header_bytes % 8
        or chunk_bytes % 8
    ):
        raise ReadError("the header is damaged", where=path)
    stats = [Stat("read.truncated_chunks", "data_loss", 1, truncation)] if truncation else []
    body: bytes | memoryview = memoryview(data)[header_bytes:]
    missing = -len(body) % chunk_bytes
    if missing:
        stats.append(
            Stat("read.truncated_chunks", "data_loss", 1, f"ends {missing} bytes before the end of a chunk")
        )
        body = bytes(body) + bytes(missing)
    words = np.frombuffer(body, "<u8")
    return _read_records(header, words, stats)


def _read_records(header: np.void, words: Words, stats: list[Stat]) -> Records:
    """Read the records of all valid chunks; damaged and missing chunks are counted in ``stats``."""
    chunk_words, declared = int(header["chunk_bytes"]) // 8, min(int(header["chunks"]), 1 << 62)
    records = _native.observer_records(words, chunk_words, declared)
    damaged, first_damaged = records["damaged_chunks"]
    missing = declared - len(words) // chunk_words
    for name, count, example in (
        ("damaged_chunk", damaged, f"chunk {first_damaged}"),
        ("truncated_chunks", missing, "chunks after the end of the file"),
        ("damaged_record", records["damaged_records"], "the rest of its chunk is skipped"),
        ("damaged_record", records["damaged_definitions"], "a definition is longer than its record"),
    ):
        if count > 0:
            stats.append(Stat(f"read.{name}", "data_loss", count, example))
    definitions: Definitions = {}
    for kind, stream, number, content in records["definitions"]:
        definitions.setdefault((kind, stream), {})[number] = content
    return Records(
        header=header,
        words=words,
        operators=records["operators"],
        lists=records["lists"],
        forms=records["forms"],
        definitions=definitions,
        notes=records["notes"],
        windows=records["windows"],
        duplicates=records["duplicates"],
        ends_without_begin=records["ends_without_begin"],
        missing_parents=records["missing_parents"],
        stats=stats,
    )


def read_json(definitions: Definitions, stream: int, number: int) -> dict[str, Any] | None:
    """Parse the JSON object in the text that a stream defines under a number; None if missing or not an object."""
    try:
        content = load_json(definitions.get((TEXT, stream), {}).get(number, b"null"))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
