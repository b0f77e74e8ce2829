"""Access the events of a rank as numpy arrays, each computed once; text predicates run once per distinct text."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import _native
from etloom.core import arrays, categories, text_codes
from etloom.core.machine import shared_property
from etloom.graphs.graph import Int32Array, Int64Array

Mask = NDArray[np.bool_]

WAIT_NAMES = r"(?i)::_?wait|^wait|::barrier|monitored_barrier"
"""Names of host events whose purpose is to wait."""


class TextColumn(text_codes.CodedColumn):
    """A text column whose integer ``codes`` have ``null_code`` for null."""

    def __init__(self, column: pl.Series) -> None:
        super().__init__(column)
        self._column = column
        greatest = int(self._codes.max(initial=0))
        has_null = greatest == text_codes.ABSENT
        self.null_code = text_codes.count_codes(self._codes) if has_null else greatest + 1
        self.codes = np.minimum(self._codes, np.uint32(self.null_code)) if has_null else self._codes

    def take(self, rows: NDArray[np.integer[Any]]) -> pl.Series:
        """Return the texts of the rows ``rows`` (numbers)."""
        return self._column[rows].cast(pl.String)

    def compute_numbers(
        self, rows: NDArray[np.integer[Any]], function: Callable[..., pl.Expr], *arguments: Hashable
    ) -> NDArray[np.uint8]:
        """Return an integer below 255 for the text of each of ``rows``; see `text_codes.compute_numbers`."""
        texts = arrays.take_rows(self._column, rows)
        return text_codes.compute_numbers(texts, function, *arguments)

    def same_as(self, rows: NDArray[Any]) -> Mask:
        """Return a mask of the rows that have the same text as any of ``rows``; null equals null."""
        in_rows = np.zeros(self.null_code + 1, bool)
        in_rows[self.codes[rows]] = True
        return look_up_mask(in_rows, self.codes)


def look_up_mask(table: NDArray[Any], codes: NDArray[Any]) -> Mask:
    """Look up each code in a boolean table indexed by code, and return a mask; codes are not negative."""
    mask: Mask = _native.looked_up(table.view(np.uint8), codes.view(np.uint32)).view(np.bool_)
    return mask


class EventArrays:
    """The columns of the events of a linked trace as arrays, one element per row.

    ``table``: the events table. ``id``, ``start``, ``end`` (not before the start; equal to the start if the duration
    is unknown), ``timed`` (start and duration are known), ``depth`` (-1 if not on a thread's stack), ``pid`` (0 for
    none).
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table
        self.locks: dict[Any, Any] = {}
        # Views of the table if it has no nulls.
        self.id: Int32Array = table["id"].to_numpy().view(np.int32)
        self.start: Int64Array = arrays.to_array(table["ts"], 0)
        self.end: Int64Array = np.maximum(arrays.to_array(table["dur"], 0), 0)
        self.end += self.start
        self.timed: Mask = arrays.is_present(table["ts"]) & arrays.is_present(table["dur"])
        self.depth = table["depth"].fill_null(-1).to_numpy()
        self.pid: Int64Array = arrays.to_array(table["pid"], 0)

    def __len__(self) -> int:
        return len(self.id)

    @shared_property
    def cats(self) -> TextColumn:
        """The category of each event."""
        return TextColumn(self.table["cat"])

    @shared_property
    def names(self) -> TextColumn:
        """The name of each event."""
        return TextColumn(self.table["name"])

    @shared_property
    def threads(self) -> Int32Array:
        """The integer code of the thread of each event."""
        tid = arrays.to_array(self.table["tid"], np.iinfo(np.int64).max)
        threads: Int32Array = _native.number_pairs(
            arrays.to_array(self.table["pid"], np.iinfo(np.int64).max), tid
        )
        return threads

    @shared_property
    def parent(self) -> Int32Array:
        """The row of each event's enclosing event, -1 for none."""
        return self.rows(self.table["parent"])

    @shared_property
    def host(self) -> Mask:
        """Mask of the host events that have a start and a duration."""
        return self.cats.match_values(categories.HOST_CATEGORIES) & self.timed

    def rows(self, ids: pl.Series) -> Int32Array:
        """Return the row number of each event id; -1 for null and for an unknown id."""
        return rows_of_ids(self.table, ids)


def ids_of_rows(rows: Int32Array, ids: Int32Array) -> Int32Array:
    """Return the id at each row number of a table with ascending ids; negative for a negative row number."""
    # In a table with all its rows, ids are row numbers.
    if ids.size and ids[0] == 0 and ids[-1] == ids.size - 1:
        return rows
    row_ids: Int32Array = arrays.select_values(ids, rows)
    return row_ids


def rows_of_ids(events: pl.DataFrame, ids: pl.Series) -> Int32Array:
    """Return the row number of each id in a table, int32; -1 for null and for an id that is not in the table."""
    return arrays.rows_of_ids(events, ids, np.int32)
