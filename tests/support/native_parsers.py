"""Drives the native parsers on bytes, and compares what they give with the reference parsers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import polars as pl

from etloom import _native
from etloom.formats.io.native_parser import take_frames
from support import reference_parsers

PARSERS = {"kineto": _native.kineto_parser, "execution_trace": _native.execution_trace_parser}
NEVER = 1 << 40
REFERENCES = {"kineto": reference_parsers.kineto, "execution_trace": reference_parsers.execution_trace}


def in_chunks(document: bytes, size: int) -> Iterable[bytes]:
    return (document[start : start + size] for start in range(0, len(document), size))


def parse_with(
    kind: str, pieces: bytes | Iterable[bytes], split_from: int, only_by_tokens: bool = False
) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
    """Parse pieces of a document, those of ``split_from`` bytes or more by two threads; return tables and summary."""
    parser = PARSERS[kind]()
    parser.split_from(split_from)
    if only_by_tokens:
        parser.only_by_tokens()
    for number, piece in enumerate([pieces] if isinstance(pieces, bytes) else pieces):
        if (number + only_by_tokens) % 2:
            parser.feed(piece)
        else:  # as plain files are read
            with parser.room(len(piece) + 7) as room:
                room[: len(piece)] = piece
            parser.extend(len(piece))
    parser.finish()
    tables = take_frames(parser)
    return tables, parser.summary()


def parse(kind: str, pieces: bytes | Iterable[bytes]) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
    """The tables and the summary that the native parser of that kind gives for these bytes.

    Asserts that one and two threads, and rows of a known layout and their tokens, give the same.
    """
    pieces = [pieces] if isinstance(pieces, bytes) else list(pieces)
    tables, summary = parse_with(kind, pieces, split_from=NEVER, only_by_tokens=True)
    for split_from in (NEVER, 1):
        others, other_summary = parse_with(kind, pieces, split_from)
        assert other_summary == summary
        assert others.keys() == tables.keys()
        for name, table in tables.items():
            assert others[name].equals(table), name
    return tables, summary


def troubles(summary: dict[str, Any]) -> Counter[str]:
    return Counter({name: count for name, (count, _) in summary["troubles"].items()})


def assert_spaced(text: str) -> None:
    """JSON text has one space behind each comma and colon, and no other."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "s", text)
    assert bare == re.sub(r"([,:])", r"\1 ", re.sub(r"\s", "", bare)), text


def values_of(table: str, name: str, column: pl.Series) -> list[Any]:
    """The column as the reference gives it: JSON text as the value it stands for."""
    if column.dtype == pl.Categorical:
        column = column.cast(pl.String)
    if name not in reference_parsers.JSON_COLUMNS.get(table, ()):
        return column.to_list()
    known: dict[str | None, Any] = {None: None}
    for text in column.unique().drop_nulls():
        assert_spaced(text)
        known[text] = reference_parsers.plain(reference_parsers.load(text))
    return [known[text] for text in column]


def assert_equal(kind: str, document: bytes, pieces: Iterable[bytes] | None = None) -> None:
    """The native parser gives what the reference gives: every column, every count."""
    tables, summary = parse(kind, document if pieces is None else pieces)
    expected = REFERENCES[kind](document)
    assert summary["rows"] == expected.rows
    assert not summary["truncated"]
    assert summary["trailing"] == 0
    assert {name: set(frame.columns) for name, frame in tables.items()} == {
        name: set(columns) for name, columns in expected.tables.items()
    }
    for name, columns in expected.tables.items():
        for column, values in columns.items():
            found = values_of(name, column, tables[name][column])
            assert len(found) == len(values), f"{name}: {len(found)} rows, not {len(values)}"
            wrong = [row for row, (a, b) in enumerate(zip(found, values, strict=True)) if a != b]
            assert not wrong, (
                f"{name}.{column}[{wrong[0]}]: {found[wrong[0]]!r}, not {values[wrong[0]]!r}; {len(wrong)} differ"
            )
    assert troubles(summary) == expected.troubles
    header = [
        (key.decode(), reference_parsers.plain(reference_parsers.load(value)))
        for key, value in summary["header"]
    ]
    assert header == [(key, reference_parsers.plain(value)) for key, value in expected.header]


SKIPPED = ("invalid_event", "no_phase", "no_time", "no_id", "empty_metadata", "no_counter")


def assert_accounted(kind: str, tables: dict[str, pl.DataFrame], summary: dict[str, Any]) -> None:
    """Every row of the file is in a table or counted as skipped."""
    counts = troubles(summary)
    names = ("nodes",) if kind == "execution_trace" else ("events", "flows", "memory", "metadata")
    read = sum(tables[name].height for name in names) + counts["counter_events"]
    assert read + sum(counts[name] for name in SKIPPED) == summary["rows"]
