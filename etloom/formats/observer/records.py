"""Reads the chunks and records of an observer file; only chunks that pass all checks are used.

Layout: docs/observer-format.md and etloom/collector/observer/native/format.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.formats.io.compression import read_content
from etloom.formats.io.json_text import load_json

Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

MAGIC = b"ETLOBS\r\n"
VERSION = 1
BEGIN, END, DEFINE, WINDOW, NOTE = 1, 2, 3, 4, 5
NAME, LAYOUT, FORM, TEXT = 1, 2, 3, 4
HEAD_WORDS = {BEGIN: 6, END: 3, DEFINE: 2, WINDOW: 3, NOTE: 2}

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
_CHUNK_MAGIC = 0x4B4E4843
_CHUNK_WORDS = 8  # size of a chunk's header
_MAX_HEADER_BYTES = 1 << 20
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 1024, 1 << 24
_MAX_FILE_BYTES = 1 << 36


@dataclass
class Records:
    """All records of a file.

    Attributes:
        header: The file's header.
        words: The file after the header, as 64-bit words.
        stats: Rows of stats about damage.
        at: Index of the first word of each record. The other arrays have one value per record as well; ``size`` is
            in words, ``chunk`` the index of the chunk among those that are used.
    """

    header: np.void
    words: Words
    at: Indices  # index of a record's first word
    type: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    size: npt.NDArray[np.int64]  # words
    id: npt.NDArray[np.int64]
    chunk: Indices
    stream: Indices
    os_tid: Indices
    rf_tid: Indices
    stats: list[Stat] = field(default_factory=list)

    def select_rows(self, record_type: int) -> Indices:
        """Return the rows of the records of one type."""
        return np.flatnonzero(self.type == record_type)


def load_records(path: Path) -> Records:
    """Read the records of a file.

    Raises:
        ReadError: It is not an observer file, has another version or a damaged header.
    """
    data, truncation = read_content(path, _MAX_FILE_BYTES)
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
    words = np.frombuffer(body, "<u8").reshape(-1, chunk_bytes // 8)
    chunks = _find_valid_chunks(words, min(int(header["chunks"]), 1 << 62), stats)
    return _walk_records(header, words, chunks, stats)


def _find_valid_chunks(words: Words, declared: int, stats: list[Stat]) -> Indices:
    """Return the indices of the valid chunks, in the order in which they were allocated."""
    has_magic = (words[:, 0] & 0xFFFFFFFF) == _CHUNK_MAGIC
    kind = (words[:, 0] >> 32) & 0xFF
    used = (words[:, 2] >> 32).astype(np.int64)
    capacity = (words.shape[1] - _CHUNK_WORDS) * 8
    valid = has_magic & np.isin(kind, (1, 2)) & (used <= capacity) & (used % 8 == 0)
    unused = ~has_magic & (words[:, 0] == 0) & (np.arange(len(words)) >= declared)
    for row in np.flatnonzero(valid & (((words[:, 0] >> 40) & 0xFF) == 1)):
        payload = words[row, _CHUNK_WORDS : _CHUNK_WORDS + used[row] // 8]
        weights = np.arange(1, len(payload) + 1, dtype=np.uint64)
        valid[row] = (
            payload.sum(dtype=np.uint64) == words[row, 5]
            and (payload * weights).sum(dtype=np.uint64) == words[row, 6]
        )
    damaged = np.flatnonzero(~valid & ~unused)
    if len(damaged):
        stats.append(Stat("read.damaged_chunk", "data_loss", len(damaged), f"chunk {damaged[0]}"))
    if declared > len(words):
        stats.append(
            Stat(
                "read.truncated_chunks",
                "data_loss",
                declared - len(words),
                "chunks after the end of the file",
            )
        )
    chunks = np.flatnonzero(valid)
    return chunks[np.argsort(words[chunks, 1], kind="stable")]


def _walk_records(header: np.void, words: Words, chunks: Indices, stats: list[Stat]) -> Records:
    """Find all records. All chunks are walked in parallel, so there are as many steps as records in a chunk."""
    flat = words.reshape(-1)
    position = chunks * words.shape[1] + _CHUNK_WORDS
    end = position + (words[chunks, 2] >> 32).astype(np.int64) // 8
    min_size = np.full(256, 1 << 30, np.int64)
    for record_type, size in HEAD_WORDS.items():
        min_size[record_type] = size
    active = np.flatnonzero(position < end)
    steps: list[tuple[Indices, Indices]] = []
    damaged = 0
    while len(active):
        head = flat[position[active]]
        sizes = ((head >> 16) & 0xFFFF).astype(np.int64)
        valid = (sizes >= min_size[(head & 0xFF).astype(np.int64)]) & (
            position[active] + sizes <= end[active]
        )
        damaged += int((~valid).sum())
        active, sizes = active[valid], sizes[valid]
        steps.append((active, position[active].copy()))
        position[active] += sizes
        active = active[position[active] < end[active]]
    if damaged:
        stats.append(Stat("read.damaged_record", "data_loss", damaged, "the rest of its chunk is skipped"))
    chunk = np.concatenate([step[0] for step in steps]) if steps else np.empty(0, np.int64)
    first_word = np.concatenate([step[1] for step in steps]) if steps else np.empty(0, np.int64)
    # The steps are in the order of the words of a chunk. Small numbers are sorted in linear time.
    order = np.argsort(chunk.astype(np.min_scalar_type(len(chunks))), kind="stable")
    chunk, first_word = chunk[order], first_word[order]
    head = flat[first_word]
    return Records(
        header=header,
        words=flat,
        at=first_word,
        type=(head & 0xFF).astype(np.uint8),
        flags=((head >> 8) & 0xFF).astype(np.uint8),
        size=((head >> 16) & 0xFFFF).astype(np.int64),
        id=(head >> 32).astype(np.int64),
        chunk=chunk,
        stream=(words[chunks, 2] & 0xFFFFFFFF).astype(np.int64)[chunk],
        os_tid=words[chunks, 3].astype(np.int64)[chunk],
        rf_tid=words[chunks, 4].astype(np.int64)[chunk],
        stats=stats,
    )


Definitions = dict[tuple[int, int], dict[int, bytes]]
"""(kind, stream) -> id -> bytes; kinds are NAME, LAYOUT, FORM and TEXT."""


def read_definitions(records: Records) -> Definitions:
    """Return all definitions; the first one of an id counts."""
    definitions: Definitions = {}
    incomplete: dict[tuple[int, int, int], bytes] = {}
    words = records.words
    damaged = 0
    for row in records.select_rows(DEFINE).tolist():
        first, size = int(records.at[row]), int(records.size[row])
        length, continues = int(words[first + 1] & 0xFFFFFFFF), int(words[first + 1] >> 32)
        if length > (size - 2) * 8:
            damaged += 1
            continue
        key = (int(records.flags[row]), int(records.stream[row]), int(records.id[row]))
        content = incomplete.pop(key, b"") + words[first + 2 : first + size].tobytes()[:length]
        if continues:
            incomplete[key] = content
        else:
            definitions.setdefault(key[:2], {}).setdefault(key[2], content)
    if damaged:
        records.stats.append(
            Stat("read.damaged_record", "data_loss", damaged, "a definition is longer than its record")
        )
    return definitions


def read_json(definitions: Definitions, stream: int, number: int) -> dict[str, Any] | None:
    """Return the JSON object of a TEXT definition; None where it is missing or not an object."""
    try:
        content = load_json(definitions.get((TEXT, stream), {}).get(number, b"null"))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
