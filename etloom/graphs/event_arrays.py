"""The events of a rank as arrays, each made once; what is asked of their texts, asked once a distinct one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import _native
from etloom.core import arrays, categories
from etloom.graphs.algorithms import Int32Array, Int64Array

Mask = NDArray[np.bool_]

WAIT_NAMES = r"(?i)::_?wait|^wait|::barrier|monitored_barrier"
"""Host events that are there to wait."""


class TextColumn:
    """A text column, by ``codes`` (``none`` of null): a question about it costs one look at each distinct text."""

    def __init__(self, column: pl.Series) -> None:
        codes = column.to_physical().cast(pl.UInt32)
        self.none = int(codes.max() or 0) + 1  # type: ignore[arg-type]
        self.codes = codes.fill_null(self.none).to_numpy()
        row = codes.arg_unique()
        row = row.filter(codes[row].is_not_null())
        self._used = self.codes[row.to_numpy()]
        self._texts: list[str] = column[row].cast(pl.String).to_list()

    def asked(self, question: Callable[[pl.Expr], pl.Expr]) -> Mask:
        """Of which rows a question is true; false of null."""
        texts = pl.DataFrame({"text": self._texts}, schema={"text": pl.String})
        return self._true(texts.select(question(pl.col("text")).fill_null(False)).to_series().to_list())

    def like(self, expression: str) -> Mask:
        """Which rows match a regular expression somewhere."""
        search = re.compile(expression).search
        return self._true([search(text) is not None for text in self._texts])

    def among(self, values: Collection[str]) -> Mask:
        """Which rows hold one of these values."""
        return self._true([text in values for text in self._texts])

    def that(self, question: Callable[[str], bool]) -> Mask:
        """What is true of each code, by a question about a text; false of ``none``."""
        return self._table([question(text) for text in self._texts])

    def _table(self, of_texts: list[bool]) -> Mask:
        true = np.zeros(self.none + 1, bool)
        true[self._used] = of_texts
        return true

    def _true(self, of_texts: list[bool]) -> Mask:
        return look_up_mask(self._table(of_texts), self.codes)

    def as_in(self, rows: NDArray[Any]) -> Mask:
        """Which rows hold what one of these does; null is as any text."""
        held = np.zeros(self.none + 1, bool)
        held[self.codes[rows]] = True
        return look_up_mask(held, self.codes)


def look_up_mask(table: NDArray[Any], codes: NDArray[Any]) -> Mask:
    """What a table, true or false, says of each code (not negative)."""
    found: Mask = _native.looked_up(table.view(np.uint8), codes.view(np.uint32)).view(np.bool_)
    return found


class EventArrays:
    """The events of a linked trace, by row.

    ``table``: all of them. ``id``, ``start``, ``end`` (not before the start; the start, where the duration is not
    known), ``timed`` (both are known), ``depth`` (-1 off the threads), ``pid`` (0 for none).
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table
        # Views of the table where it has no nulls.
        self.id: Int32Array = table["id"].to_numpy().view(np.int32)
        self.start: Int64Array = arrays.to_array(table["ts"], 0)
        self.end: Int64Array = np.maximum(arrays.to_array(table["dur"], 0), 0)
        self.end += self.start
        self.timed: Mask = (table["ts"].is_not_null() & table["dur"].is_not_null()).to_numpy()
        self.depth = table["depth"].fill_null(-1).to_numpy()
        self.pid: Int64Array = arrays.to_array(table["pid"], 0)

    def __len__(self) -> int:
        return len(self.id)

    @cached_property
    def cats(self) -> TextColumn:
        return TextColumn(self.table["cat"])

    @cached_property
    def names(self) -> TextColumn:
        return TextColumn(self.table["name"])

    @cached_property
    def lanes(self) -> Int32Array:
        """A number for the thread of each."""
        tid = arrays.to_array(self.table["tid"], np.iinfo(np.int64).max)
        lanes: Int32Array = _native.number_pairs(
            arrays.to_array(self.table["pid"], np.iinfo(np.int64).max), tid
        )
        return lanes

    @cached_property
    def parent(self) -> Int32Array:
        """The row of the event around each, -1 for none."""
        return self.rows(self.table["parent"])

    @cached_property
    def host(self) -> Mask:
        """Timed events of the host."""
        return self.cats.among(categories.HOST_CATEGORIES) & self.timed

    def rows(self, wanted: pl.Series) -> Int32Array:
        """The rows of the events with these ids; -1 for null and for an id there is not."""
        return rows_of_ids(self.table, wanted)


def ids_of_rows(rows: Int32Array, ids: Int32Array) -> Int32Array:
    """The ids of these rows of a table with these ids, which ascend in it; a negative number for a negative row."""
    # Ids of a table from which no row was taken are its row numbers.
    if ids.size and ids[0] == 0 and ids[-1] == ids.size - 1:
        return rows
    found: Int32Array = np.where(rows >= 0, ids[rows], np.int32(-1))
    return found


def rows_of_ids(events: pl.DataFrame, wanted: pl.Series) -> Int32Array:
    """Return the rows of a table with these ids as int32; -1 for null and for an id that the table lacks."""
    return arrays.rows_of_ids(events, wanted, np.int32)
