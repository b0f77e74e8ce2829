"""The chunks and records of an observer's file: nothing is believed before its place is known to be whole.

Layout: docs/observer-format.md and etloom/collector/observer/native/format.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.formats.io.compression import read_content

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
        ("first_ns", "<i8"),  # 0 in files of the first etloom, and before a window opened
        ("overwritten_ns", "<i8"),
    ]
)
_CHUNK_MAGIC = 0x4B4E4843
_CHUNK_WORDS = 8  # of a chunk's header
_MAX_CHUNK_BYTES = 1 << 24
_MAX_FILE_BYTES = 1 << 36


@dataclass
class Records:
    """All records of a file: `words` holds the file, the other arrays a value a record."""

    header: np.void
    words: Words
    at: Indices  # index of a record's first word
    type: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    size: npt.NDArray[np.int64]  # words
    id: npt.NDArray[np.int64]
    chunk: Indices  # row of the arrays below
    stream: Indices
    os_tid: Indices
    rf_tid: Indices
    stats: list[Stat] = field(default_factory=list)

    def of(self, kind: int) -> Indices:
        """Rows of the records of a kind."""
        return np.flatnonzero(self.type == kind)


def load_records(path: Path) -> Records:
    """The records of a file. Raises ReadError for what is no such file or of another version."""
    data, cut = read_content(path, _MAX_FILE_BYTES)
    if len(data) < _HEADER.itemsize or not data.startswith(MAGIC):
        raise ReadError("this is no file of the observer", where=path)
    header = np.frombuffer(data, _HEADER, 1)[0]
    if header["version"] != VERSION:
        raise ReadError(
            f"version {header['version']} of the observer's format",
            where=path,
            remedy=f"this etloom reads version {VERSION}: take the one that wrote it",
        )
    head, size = int(header["header_bytes"]), int(header["chunk_bytes"])
    if not (_HEADER.itemsize <= head <= 1 << 20 and 1024 <= size <= _MAX_CHUNK_BYTES) or head % 8 or size % 8:
        raise ReadError("the header is damaged", where=path)
    stats: list[Stat] = [Stat("read.cut_file", "data_loss", 1, cut)] if cut else []
    body = data[head:]
    missing = -len(body) % size
    if missing:
        stats.append(Stat("read.cut_file", "data_loss", 1, f"ends {missing} bytes before the end of a chunk"))
        body += bytes(missing)
    words = np.frombuffer(body, "<u8").reshape(-1, size // 8)
    return _walk_records(
        header, words, _find_valid_chunks(words, min(int(header["chunks"]), 1 << 62), stats), stats
    )


def _find_valid_chunks(words: Words, claimed: int, stats: list[Stat]) -> Indices:
    """Rows of the chunks to believe, in the order in which they were taken."""
    ours = (words[:, 0] & 0xFFFFFFFF) == _CHUNK_MAGIC
    kind = (words[:, 0] >> 32) & 0xFF
    used = (words[:, 2] >> 32).astype(np.int64)
    room = (words.shape[1] - _CHUNK_WORDS) * 8
    fine = ours & np.isin(kind, (1, 2)) & (used <= room) & (used % 8 == 0)
    unused = ~ours & (words[:, 0] == 0) & (np.arange(len(words)) >= claimed)
    for row in np.flatnonzero(fine & (((words[:, 0] >> 40) & 0xFF) == 1)):
        payload = words[row, _CHUNK_WORDS : _CHUNK_WORDS + used[row] // 8]
        weights = np.arange(1, len(payload) + 1, dtype=np.uint64)
        fine[row] = (
            payload.sum(dtype=np.uint64) == words[row, 5]
            and (payload * weights).sum(dtype=np.uint64) == words[row, 6]
        )
    lost = np.flatnonzero(~fine & ~unused)
    if len(lost):
        stats.append(Stat("read.damaged_chunk", "data_loss", len(lost), f"chunk {lost[0]}"))
    if claimed > len(words):
        stats.append(
            Stat("read.cut_file", "data_loss", claimed - len(words), "chunks behind the end of the file")
        )
    kept = np.flatnonzero(fine)
    return kept[np.argsort(words[kept, 1], kind="stable")]


def _walk_records(header: np.void, words: Words, chunks: Indices, stats: list[Stat]) -> Records:
    """Step through all chunks side by side, a record of each a step: as many steps as a chunk has records."""
    width = words.shape[1]
    flat = words.reshape(-1)
    at = chunks * width + _CHUNK_WORDS
    end = at + (words[chunks, 2] >> 32).astype(np.int64) // 8
    least = np.full(256, 1 << 30, np.int64)
    for kind, size in HEAD_WORDS.items():
        least[kind] = size
    going = np.flatnonzero(at < end)
    found: list[tuple[Indices, Indices]] = []
    broken = 0
    while len(going):
        head = flat[at[going]]
        size = ((head >> 16) & 0xFFFF).astype(np.int64)
        fine = (size >= least[(head & 0xFF).astype(np.int64)]) & (at[going] + size <= end[going])
        broken += int((~fine).sum())
        going, size = going[fine], size[fine]
        found.append((going, at[going].copy()))
        at[going] += size
        going = going[at[going] < end[going]]
    if broken:
        stats.append(Stat("read.damaged_record", "data_loss", broken, "the rest of its chunk is left out"))
    row = np.concatenate([pair[0] for pair in found]) if found else np.empty(0, np.int64)
    place = np.concatenate([pair[1] for pair in found]) if found else np.empty(0, np.int64)
    order = np.lexsort((place, row))
    row, place = row[order], place[order]
    head = flat[place]
    return Records(
        header,
        flat,
        place,
        (head & 0xFF).astype(np.uint8),
        ((head >> 8) & 0xFF).astype(np.uint8),
        ((head >> 16) & 0xFFFF).astype(np.int64),
        (head >> 32).astype(np.int64),
        row,
        (words[chunks, 2] & 0xFFFFFFFF).astype(np.int64)[row],
        words[chunks, 3].astype(np.int64)[row],
        words[chunks, 4].astype(np.int64)[row],
        stats,
    )


def read_definitions(records: Records) -> dict[tuple[int, int], dict[int, bytes]]:
    """(kind, stream) -> id -> what it stands for."""
    found: dict[tuple[int, int], dict[int, bytes]] = {}
    parts: dict[tuple[int, int, int], bytes] = {}
    words = records.words
    short = 0
    for row in records.of(DEFINE).tolist():
        at, size = int(records.at[row]), int(records.size[row])
        length, more = int(words[at + 1] & 0xFFFFFFFF), int(words[at + 1] >> 32)
        if length > (size - 2) * 8:
            short += 1
            continue
        key = (int(records.flags[row]), int(records.stream[row]), int(records.id[row]))
        text = parts.pop(key, b"") + words[at + 2 : at + size].tobytes()[:length]
        if more:
            parts[key] = text
        else:
            found.setdefault(key[:2], {}).setdefault(key[2], text)
    if short:
        records.stats.append(
            Stat("read.damaged_record", "data_loss", short, "a definition longer than its record")
        )
    return found
