"""Driving a native parser: bytes from the file in one thread, columns made in another, trouble as stats rows."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, read_chunks

Progress = Callable[[int], None]

FIRST_TEXT_ID = -(1 << 40)
"""What the file names by a text in place of a number (a process, a thread, an arrow) is numbered from here down."""

_AHEAD = 4  # chunks the reading thread may be ahead of the parser

# What the parsers count: severity, and what it means for the reader of the stats.
_MEANING = {
    "damaged": ("data_loss", "skipped, it is no valid JSON object: "),
    "no_phase": ("data_loss", "skipped, it has no phase (ph): "),
    "no_time": ("data_loss", "skipped, its time (ts) is missing or no number: "),
    "no_id": ("data_loss", "skipped, it has no id: "),
    "no_metadata": ("info", "skipped, a metadata event that says nothing: "),
    "no_counter": ("data_loss", "skipped, a counter event without a sample that could be read: "),
    "odd_counter": ("data_loss", "skipped, a counter's value or time is no number: "),
    "negative_duration": ("data_loss", "its duration is set to null: "),
    "odd_duration": ("data_loss", "its duration is no number, set to null: "),
    "no_duration": ("info", "a complete event without duration: "),
    "odd_value": ("info", "not of the type expected, kept as text: "),
    "odd_tensor": ("info", "a tensor that is not described as one, kept as text: "),
    "odd_json": ("data_loss", "no JSON, or nested too deep, set to null: "),
    "nonfinite": ("info", "NaN or infinity, which JSON has no word for, kept as text: "),
    "bad_escape": ("info", "a backslash that JSON does not know, kept as it stands: "),
    "long_text": ("info", "a text of more than a megabyte, kept whole: "),
    "no_flow_id": ("data_loss", "an arrow's end without an id, set to null"),
    "text_flow_id": ("info", f"an arrow's id that is no integer, numbered from {FIRST_TEXT_ID} down: "),
    "dropped_args": ("data_loss", "what no column holds of a counter, flow or metadata event: "),
    "counter_events": ("info", "counter events, each one or some samples: "),
    "metadata_events": ("info", "metadata events, which name processes and threads: "),
}


@dataclass(frozen=True)
class ParsedFile:
    tables: dict[str, pl.DataFrame]
    header: dict[str, Any]  # the document without its rows
    stats: list[Stat]
    rows: int


def parse_file(parser: Any, path: Path, progress: Progress | None = None) -> ParsedFile:
    """Feed the file to the parser. Raises ReadError where the document holds no rows at all."""
    stats: list[Stat] = []
    for piece in read_ahead(path, stats, progress):
        parser.feed(piece)
    parser.finish()
    return collect_result(parser, path, stats)


def collect_result(parser: Any, path: Path, stats: list[Stat]) -> ParsedFile:
    """What a parser that has finished holds. Raises as `parse` does."""
    summary = parser.summary()
    if summary["bytes"] == 0:
        raise ReadError("the file is empty", where=path)
    if not summary["found_rows"]:
        raise ReadError(
            "no trace was found in it", where=path, remedy="expected Kineto JSON or an execution trace"
        )
    if summary["truncated"]:
        stats.append(Stat("read.truncated", "data_loss", 1, "the file ends early; what came before was read"))
    if summary["trailing"]:
        stats.append(
            Stat("read.trailing_bytes", "data_loss", summary["trailing"], "behind the end of the document")
        )
    for name, (count, example) in sorted(summary["troubles"].items()):
        severity, meaning = _MEANING[name]
        stats.append(Stat(f"read.{name}", severity, count, (meaning + _text(example)).rstrip(" :")))
    header = _header(summary["header"], stats)
    return ParsedFile(take_frames(parser), header, stats, summary["rows"])


def take_frames(parser: Any) -> dict[str, pl.DataFrame]:
    """The parser's tables, taken from it."""
    return {
        name: pl.DataFrame({column: pl.Series(column, values) for column, values in columns.items()})
        for name, columns in parser.take().items()
    }


def read_ahead(path: Path, stats: list[Stat], progress: Progress | None = None) -> Iterator[bytes]:
    """The chunks of the file, read and unpacked by a second thread, which tells of progress too.

    A damaged packing ends them, counted.
    """
    pieces: queue.Queue[bytes | Exception | None] = queue.Queue(_AHEAD)
    stop = threading.Event()

    def put(piece: bytes | Exception | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                pieces.put(piece, timeout=0.1)
                return

    def work() -> None:
        try:
            for piece in read_chunks(path, progress=progress):
                put(piece)
                if stop.is_set():
                    return
            put(None)
        except Exception as error:  # handed to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=work, name="etloom-read", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, DECOMPRESSION_ERRORS):
                stats.append(
                    Stat("read.packing", "data_loss", 1, f"the packing is damaged or cut off: {piece}")
                )
                return
            if isinstance(piece, OSError):
                raise ReadError(f"cannot be read: {piece}", where=path) from None
            if isinstance(piece, Exception):
                raise piece
            yield piece
    finally:
        stop.set()
        thread.join(timeout=1)  # it may hang in a read (a pipe): then it dies with the process


def _header(members: list[tuple[bytes, bytes]], stats: list[Stat]) -> dict[str, Any]:
    header: dict[str, Any] = {}
    for key, value in members:
        try:
            header[_text(key)] = load_json(value)
        except (ValueError, RecursionError):
            stats.append(Stat("read.header", "data_loss", 1, f"the member {_text(key)!r} is damaged"))
    return header


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text that a file holds; half of a surrogate pair, which is no character, becomes U+FFFD.

    Raises ValueError, and RecursionError for what is nested too deep.
    """
    return _whole_characters(json.loads(text))


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return _HALVES.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


_HALVES = re.compile("[\ud800-\udfff]")


def _text(example: bytes) -> str:
    return " ".join(example.decode("utf-8", "replace").split())
