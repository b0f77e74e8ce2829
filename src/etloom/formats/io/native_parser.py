"""Runs a compiled trace parser, which builds columns; problems become rows of stats."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom.core.arrays import make_frame
from etloom.core.errors import ReadError
from etloom.core.machine import MIN_ARRAY_ROWS, run_paired
from etloom.core.schema import Stat
from etloom.formats.io.compression import (
    DECOMPRESSION_ERRORS,
    detect_compression,
    read_chunks,
)
from etloom.formats.io.json_text import load_json
from etloom.formats.io.limits import check_rows, max_rows

Progress = Callable[[int], None]
ReadProgress = Annotated[Progress | None, "Called with the number of bytes of the file as they are read."]
"""The option ``progress`` of readers, with its help."""

SALVAGED_MEMBER = "etloom_salvaged"
"""Member of a Kineto trace whose end was missing before `etloom salvage` closed it."""
FIRST_TEXT_ID = -(1 << 40)
"""Processes, threads and flows that the file identifies by text instead of a number get ids from here downwards."""

_PIECE_BYTES = 4 << 20
"""Bytes of an uncompressed file that are read at a time: two threads parse larger pieces faster, up to their caches."""
_MIN_PIECE_BYTES = 64 << 10
_MAX_SMALL_BYTES = 512 << 10
"""A compressed file up to this size is read without a second thread, whose start would take longer than it saves."""
_NEVER = 1 << 62
"""More bytes than any piece has: one thread parses."""
_AHEAD = 4  # chunks the reading thread may be ahead of the parser

# What the native parsers count: its severity, and its meaning for a reader of the stats.
_MEANING = {
    "invalid_event": ("data_loss", "skipped: not a valid JSON object: "),
    "no_phase": ("data_loss", "skipped: no phase (ph): "),
    "no_time": ("data_loss", "skipped: time (ts) missing or not a number: "),
    "no_id": ("data_loss", "skipped: no id: "),
    "empty_metadata": ("info", "skipped: empty metadata event: "),
    "no_counter": ("data_loss", "skipped: counter event without a readable sample: "),
    "invalid_counter": ("data_loss", "skipped: counter value or time not a number: "),
    "negative_duration": ("data_loss", "negative duration, now null: "),
    "invalid_duration": ("data_loss", "duration not a number, now null: "),
    "no_duration": ("info", "complete event without duration: "),
    "unexpected_type": ("info", "unexpected type, kept as text: "),
    "invalid_tensor": ("info", "malformed tensor description, kept as text: "),
    "invalid_json": ("data_loss", "invalid JSON or nested too deeply, now null: "),
    "nonfinite": ("info", "NaN or infinity, which JSON does not have, kept as text: "),
    "invalid_escape": ("info", "invalid JSON escape, kept unchanged: "),
    "long_text": ("info", "text of more than 1 MB, kept: "),
    "no_flow_id": ("data_loss", "flow event without id, now null"),
    "text_flow_id": ("info", f"flow id not an integer, replaced by ids from {FIRST_TEXT_ID} downwards: "),
    "unstored_args": ("data_loss", "arguments of counter or metadata events that have no column: "),
    "counter_events": ("info", "counter events, each with one or more samples: "),
    "pftrace_lost": ("data_loss", "packets were lost before one of "),
    "pftrace_no_state": ("data_loss", "skipped: an event whose names and defaults were lost, of "),
    "pftrace_clock": ("info", "no snapshot relates a clock to the others; its times are taken as they are: "),
    "pftrace_no_type": ("info", "skipped: an event that is neither a slice nor an instant or a counter: "),
    "pftrace_no_name": ("data_loss", "the file does not contain the name of "),
    "metadata_events": ("info", "metadata events (names of processes and threads): "),
}

_EMPTY_ENTRY = ("info", "skipped: an empty entry, with which TSL and NCCL end a list")


@dataclass(frozen=True)
class ParsedFile:
    """The result of a native parser: tables, header members, stats about problems, and the number of rows read."""

    tables: dict[str, pl.DataFrame]
    header: dict[str, Any]  # the members of the document other than its rows
    stats: list[Stat]
    rows: int


def parse_file(parser: Any, path: Path, progress: Progress | None = None) -> ParsedFile:
    """Read a file with a native parser; return its tables, header members and stats.

    Raises:
        ReadError: If the document has no rows.
        LimitError: If it has more rows than the memory can hold, or is a decompression bomb.
    """
    stats: list[Stat] = []
    if pl.thread_pool_size() == 1:  # there are as many processes as processors
        parser.split_from(_NEVER)
    limit = max_rows()
    for _ in feed_file(parser, path, stats, progress):
        check_rows(parser.rows, path, limit)
    parser.finish()
    return collect_result(parser, path, stats)


def collect_result(parser: Any, path: Path, stats: list[Stat]) -> ParsedFile:
    """Return tables, header members and stats of a parser that has read its input. Raises as `parse_file` does."""
    summary = parser.summary()
    if summary["bytes"] == 0:
        raise ReadError("the file is empty", where=path)
    if not summary["found_rows"]:
        raise ReadError("no trace found", where=path, remedy="expected Kineto JSON or an execution trace")
    header = load_header(summary["header"], stats)
    if summary["truncated"] or header.get(SALVAGED_MEMBER) is True:
        verb = "ends" if summary["truncated"] else "was salvaged, it ended"
        repair = "; `etloom salvage` closes it for other programs" if summary["truncated"] else ""
        stats.append(
            Stat(
                "read.truncated", "data_loss", 1, f"the file {verb} early; everything before was read{repair}"
            )
        )
    if summary["trailing"]:
        stats.append(
            Stat(
                "read.trailing_bytes",
                "data_loss",
                summary["trailing"],
                "bytes after the end of the JSON document",
            )
        )
    stats += state_troubles(summary["troubles"])
    return ParsedFile(take_frames(parser), header, stats, summary["rows"])


def state_troubles(troubles: Mapping[str, tuple[int, bytes]]) -> list[Stat]:
    """Return the stats on what a native parser counted: {name: (count, example)}."""
    stats = []
    for name, (count, example) in sorted(troubles.items()):
        severity, meaning = _EMPTY_ENTRY if (name, count, example) == ("no_phase", 1, b"") else _MEANING[name]
        stats.append(Stat(f"read.{name}", severity, count, (meaning + _to_line(example)).rstrip(" :")))
    return stats


def take_frames(parser: Any) -> dict[str, pl.DataFrame]:
    """Move the parser's columns into data frames, returned by table name."""
    return build_frames(parser.take(), parser.rows)


def build_frames(tables: Mapping[str, Mapping[str, Any]], rows: int) -> dict[str, pl.DataFrame]:
    """Return data frames, by table name, of a native parser's columns, which came from about ``rows`` rows."""
    columns = [values for table in tables.values() for values in table.values()]
    numbers = range(len(columns))
    series = iter(
        run_paired(lambda number: pl.Series(columns[number]), numbers, rows, MIN_ARRAY_ROWS).values()
    )
    return {name: make_frame({column: next(series) for column in table}) for name, table in tables.items()}


def feed_file(parser: Any, path: Path, stats: list[Stat], progress: Progress | None = None) -> Iterator[None]:
    """Feed a file to a native parser, and yield after each piece. Raises ReadError, LimitError.

    Damaged compressed data ends the file and adds a row to ``stats``.
    """
    if path.is_file() and detect_compression(path) is None:
        yield from _read_plain(parser, path, progress)
        return
    for piece in _read_ahead(path, stats, progress):
        parser.feed(piece)
        yield


def _read_plain(parser: Any, path: Path, progress: Progress | None) -> Iterator[None]:
    """Read an uncompressed file into the memory of a parser, and yield after each piece.

    A second thread would only compete with those that parse: reading takes a tenth of their time.
    """
    with _converting_read_errors(path):
        file = path.open("rb", buffering=0)
    with file:
        # The size may be stated as 0, or the file may grow.
        piece_bytes = min(_PIECE_BYTES, max(os.fstat(file.fileno()).st_size + 1, _MIN_PIECE_BYTES))
        while True:
            with _converting_read_errors(path), parser.room(piece_bytes) as room:
                size = file.readinto(room)
            if not size:
                return
            with contextlib.suppress(AttributeError, OSError):  # the system reads the next piece meanwhile
                os.posix_fadvise(file.fileno(), file.tell(), piece_bytes, os.POSIX_FADV_WILLNEED)
            parser.extend(size)
            if progress is not None:
                progress(size)
            yield


@contextlib.contextmanager
def _converting_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror or error}", where=path) from None


def _read_ahead(path: Path, stats: list[Stat], progress: Progress | None) -> Iterator[bytes]:
    """Yield the chunks of a file, read and decompressed by a second thread, which also reports progress.

    A small file takes no second thread.
    """
    is_small = path.is_file() and path.stat().st_size <= _MAX_SMALL_BYTES
    for piece in (_read_pieces if is_small else _read_pieces_ahead)(path, progress):
        if isinstance(piece, DECOMPRESSION_ERRORS):
            example = f"damaged or cut-off compressed data: {piece}"
            stats.append(Stat("read.corrupt_compression", "data_loss", 1, example))
            return
        if isinstance(piece, OSError):
            raise ReadError(f"cannot be read: {piece.strerror or piece}", where=path) from None
        if isinstance(piece, Exception):
            raise piece
        yield piece


def _read_pieces(path: Path, progress: Progress | None) -> Iterator[bytes | Exception]:
    """Yield the decompressed chunks of a file; if reading fails, the last item is the exception."""
    try:
        yield from read_chunks(path, progress=progress)
    except Exception as error:  # passed to the consumer, which raises it
        yield error


def _read_pieces_ahead(path: Path, progress: Progress | None) -> Iterator[bytes | Exception]:
    """Yield the items of `_read_pieces`, which a second thread reads a few chunks ahead."""
    pieces: queue.Queue[bytes | Exception | None] = queue.Queue(_AHEAD)
    stop = threading.Event()

    def enqueue(piece: bytes | Exception | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                pieces.put(piece, timeout=0.1)
                return

    def work() -> None:
        for piece in _read_pieces(path, progress):
            enqueue(piece)
            if stop.is_set():
                return
        enqueue(None)

    thread = threading.Thread(target=work, name="etloom-read", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            yield piece
    finally:
        stop.set()
        thread.join(timeout=1)  # it may block in a read (a pipe); it then ends with the process


def load_header(members: list[tuple[bytes, bytes]], stats: list[Stat]) -> dict[str, Any]:
    """Return the members of a document other than its rows, from their JSON; ``stats`` counts the damaged ones."""
    header: dict[str, Any] = {}
    for key, value in members:
        try:
            header[_to_line(key)] = load_json(value)
        except (ValueError, RecursionError):
            stats.append(Stat("read.header", "data_loss", 1, f"the member {_to_line(key)!r} is damaged"))
    return header


def _to_line(example: bytes) -> str:
    return " ".join(example.decode("utf-8", "replace").split())
