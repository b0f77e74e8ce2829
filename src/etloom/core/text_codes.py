"""Works on integer codes of categorical text: results are computed once per distinct text instead of once per row.

The codes of polars' Categorical are the same in all columns of a process as long as one column of them exists, which
this module holds. So a mask of texts by a regular expression is kept as a table by code, which ranks of one program,
whose names are the same, share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import lru_cache

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom._native import distinct_codes, looked_up, row_indexes

ABSENT = np.iinfo(np.uint32).max
"""The code of null."""
_ANCHOR = pl.Series([""], dtype=pl.Categorical)
"""Keeps the codes of the process: polars drops them with the last column."""
_CODES = pl.col("text").to_physical()
_CODES_WITHOUT_NULL = _CODES.fill_null(ABSENT)
_MAX_KEPT = 1 << 18
"""Texts of greater codes are matched at each call, so that the tables stay small."""
_FIRST_ROWS = 1 << 15
_UNKNOWN = np.uint8(255)
"""Entry of a table for a text that has not occurred."""

Codes = NDArray[np.uint32]
Mask = NDArray[np.bool_]
Numbers = NDArray[np.uint8]


def read_codes(column: pl.Series) -> Codes:
    """Return the integer code of the text in each row of a Categorical column, ABSENT for null."""
    query = _CODES_WITHOUT_NULL if column.null_count() else _CODES
    codes: Codes = column.to_frame("text").select_seq(query).to_series().to_numpy()
    return codes


def find_distinct(codes: Codes) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return one row number per distinct code, and for each row the index of its code among these; -1 for ABSENT."""
    return distinct_codes(codes)


class CodedColumn:
    """A Categorical column prepared for many matches: each tests the distinct texts and then marks the rows.

    Args:
        column: The column.
    """

    def __init__(self, column: pl.Series) -> None:
        self._codes = read_codes(column)
        rows = find_distinct(self._codes)[0]
        self._distinct = self._codes[rows]
        self._texts = column[pl.Series("", row_indexes(rows))]

    def match_pattern(self, pattern: str) -> Mask:
        """Return a mask of the rows that contain a match of a regular expression; null does not match."""
        return self._mark(_tabulate(_contains, pattern).look_up(self._texts, self._distinct).view(np.bool_))

    def match_values(self, values: Collection[str]) -> Mask:
        """Return a mask of the rows whose text is one of ``values``."""
        return self._mark(match_codes(self._distinct, values))

    def _mark(self, matches: Mask) -> Mask:
        return _mask_codes(self._codes, self._distinct[matches])


def _mask_codes(codes: Codes, selected: Codes) -> Mask:
    """Return a mask of the rows whose code is one of ``selected``."""
    if selected.size <= 1:
        return codes == selected[0] if selected.size else np.zeros(codes.size, np.bool_)
    if selected.max() >= _MAX_KEPT:
        return np.isin(codes, selected)
    table = np.zeros(int(selected.max()) + 2, np.uint8)  # the last entry is for greater codes
    table[selected] = 1
    return looked_up(table, codes, clip=True).view(np.bool_)


def match_values(column: pl.Series, values: Sequence[str]) -> Mask:
    """Return a mask of the rows of a Categorical column whose text is one of ``values``."""
    if len(values) <= 2 and not column.null_count():
        mask = np.zeros(len(column), np.bool_)
        for value in values:
            mask |= (column == value).to_numpy()
        return mask
    return match_codes(read_codes(column), values)


def match_codes(codes: Codes, values: Collection[str]) -> Mask:
    """Return a mask of the rows whose text, of which ``codes`` are the codes, is one of ``values``."""
    table = _tabulate_values(tuple(values)) if len(values) < 64 else _encode_values(tuple(values))
    if table.dtype != np.bool_:
        return np.isin(codes, table)
    return looked_up(table.view(np.uint8), codes, clip=True).view(np.bool_)


@lru_cache(maxsize=512)
def _tabulate_values(values: tuple[str, ...]) -> NDArray[np.bool_] | Codes:
    """Return a boolean table indexed by text code, True for ``values``; if codes are too large, the codes."""
    codes = _encode_values(values)
    if codes.max(initial=0) >= _MAX_KEPT:
        return codes
    table = np.zeros(int(codes.max(initial=0)) + 2, np.bool_)
    table[codes] = True
    return table


def _encode_values(values: Sequence[str]) -> Codes:
    return read_codes(pl.Series(values, dtype=pl.Categorical))


def match_distinct(column: pl.Series, codes: Codes, condition: pl.Expr) -> Mask:
    """Return a mask of the rows of a Categorical column, with a condition on ``text`` evaluated once per text.

    Args:
        column: The column; null does not match.
        codes: Its codes.
        condition: An expression of the Categorical column ``text``.
    """
    rows = find_distinct(codes)[0]
    return _mask_codes(codes, codes[rows][_compute_rows(column, rows, condition).view(np.bool_)])


def _compute_distinct(column: pl.Series, codes: Codes, expression: pl.Expr) -> Numbers:
    rows, positions = find_distinct(codes)
    return np.append(_compute_rows(column, rows, expression), np.uint8(0))[positions]


def _compute_rows(column: pl.Series, rows: NDArray[np.int64], expression: pl.Expr) -> Numbers:
    texts = column[pl.Series("", row_indexes(rows))].to_frame("text")
    numbers: Numbers = texts.select(expression.cast(pl.UInt8)).to_series().to_numpy()
    return numbers


class _TextTable:
    """A cache from text code to a number below 255, computed when a text first occurs; 0 for null.

    Args:
        expression: An expression of the Categorical column ``text``.
    """

    def __init__(self, expression: pl.Expr) -> None:
        self._expression = expression
        self._by_code = np.zeros(1, np.uint8)  # the last entry is for ABSENT

    def look_up(self, column: pl.Series, codes: Codes) -> Numbers:
        size = count_codes(codes)
        if size > _MAX_KEPT:
            return _compute_distinct(column, codes, self._expression)
        by_code = self._by_code  # read once: another thread may replace it
        if size >= by_code.size:
            larger = np.full(2 * size + 1, _UNKNOWN)
            larger[: by_code.size - 1] = by_code[:-1]
            larger[-1] = 0
            self._by_code = by_code = larger  # another thread's answers may be lost, and are computed again
        if codes.size > _FIRST_ROWS:  # most texts occur there, so that few of the other rows are unknown
            self._look_up(by_code, column, codes[:_FIRST_ROWS])
        return self._look_up(by_code, column, codes)

    def _look_up(self, by_code: Numbers, column: pl.Series, codes: Codes) -> Numbers:
        numbers: Numbers = looked_up(by_code, codes, clip=True)
        unknown = np.flatnonzero(numbers == _UNKNOWN)
        if unknown.size:
            row_by_code = np.full(by_code.size - 1, -1, np.int64)
            row_by_code[codes[unknown]] = unknown
            distinct = np.flatnonzero(row_by_code >= 0)
            by_code[distinct] = _compute_rows(column, row_by_code[distinct], self._expression)
            numbers = looked_up(by_code, codes, clip=True)
        return numbers


@lru_cache(maxsize=512)
def _tabulate(function: Callable[..., pl.Expr], *arguments: Hashable) -> _TextTable:
    return _TextTable(function(pl.col("text").cast(pl.String), *arguments))


def compute_numbers(column: pl.Series, function: Callable[..., pl.Expr], *arguments: Hashable) -> Numbers:
    """Return an integer below 255 for each row of a Categorical column, computed once per distinct text.

    Args:
        column: The column; null has the number 0.
        function: Returns an expression for the number of a text, an expression itself, with these arguments. The
            numbers are kept as long as the process, by function and arguments.
    """
    return _tabulate(function, *arguments).look_up(column, read_codes(column))


def _contains(text: pl.Expr, pattern: str) -> pl.Expr:
    return text.str.contains(pattern)


def match_pattern(column: pl.Series, pattern: str, within: Mask | None = None) -> Mask:
    """Return a mask of the rows of a Categorical column that contain a match of a regular expression.

    Args:
        column: The column; null does not match.
        pattern: The regular expression.
        within: Mask of the rows to look at; the others do not match.
    """
    codes, table = read_codes(column), _tabulate(_contains, pattern)
    if within is None:
        return table.look_up(column, codes).view(np.bool_)
    if np.count_nonzero(within) > within.size // 4:  # to select many codes takes longer than to look them up
        every: Mask = table.look_up(column, codes).view(np.bool_) & within
        return every
    matches = np.zeros(codes.size, np.bool_)
    if (rows := np.flatnonzero(within)).size:
        texts = column[pl.Series("", row_indexes(rows))]
        matches[rows] = table.look_up(texts, codes[rows]).view(np.bool_)
    return matches


def count_codes(codes: Codes) -> int:
    """Return the largest text code plus 1, without regard to ABSENT (null)."""
    greatest = int(codes.max(initial=0))
    if greatest == ABSENT:
        greatest = int(codes[codes != ABSENT].max(initial=0))
    return greatest + 1
