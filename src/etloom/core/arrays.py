"""Converts columns to numpy arrays: masks of text columns, row numbers of ids, groups and selections of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import numpy as np
import polars as pl

from etloom import _native
from etloom.core import text_codes

_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)
"""Types of which all values fit into int64."""


def is_in(column: pl.Series, values: Collection[str]) -> np.ndarray:
    """Return a mask of the rows of a text column whose text is one of ``values``; False for null."""
    if column.dtype == pl.Categorical:
        return text_codes.match_values(column, list(values))
    return column.is_in(list(values), nulls_equal=True).to_numpy()


def match_text(
    column: pl.Series,
    predicate: str | Callable[[pl.Expr], pl.Expr],
    within: np.ndarray | None = None,
) -> np.ndarray:
    """Return a mask of the rows of a text column that satisfy a predicate, evaluated once per distinct text.

    Args:
        column: The column; null never matches.
        predicate: A regular expression, which is faster, or a function from an expression of text to a boolean one.
        within: Mask of the rows to look at (default: all); few rows take less time. The others do not match.
    """
    if column.dtype != pl.Categorical:
        column = column.cast(pl.Categorical)
    if isinstance(predicate, str):
        return text_codes.match_pattern(column, predicate, within)
    if within is not None:
        mask = np.zeros(len(column), np.bool_)
        mask[within] = match_text(column.filter(pl.Series(within)), predicate)
        return mask
    condition = predicate(pl.col("text").cast(pl.String)).fill_null(False)
    return text_codes.match_distinct(column, text_codes.read_codes(column), condition)


def list_distinct(column: pl.Series) -> pl.Series:
    """Return each text of a text column once, without null."""
    if column.dtype != pl.Categorical:
        return column.drop_nulls().unique().cast(pl.String)
    rows, _ = text_codes.find_distinct(text_codes.read_codes(column))
    return take_rows(column, rows).cast(pl.String)


def map_text(column: pl.Series, function: Callable[[pl.Expr], pl.Expr]) -> pl.Series:
    """Apply an expression to a text column, once per distinct text; the result is Categorical."""
    if column.dtype != pl.Categorical:
        column = column.cast(pl.Categorical)
    rows, positions = text_codes.find_distinct(text_codes.read_codes(column))
    texts = take_rows(column, np.append(rows, -1)).to_frame("text")  # null has the last position, -1
    new = texts.select(function(pl.col("text").cast(pl.String)).cast(pl.Categorical)).to_series()
    return new[pl.Series(np.where(positions < 0, rows.size, positions).astype(np.uint32))].alias(column.name)


def encode_texts(column: pl.Series) -> np.ndarray:
    """Return an integer code from 0 for the text of each row; equal texts get equal codes, null a separate code."""
    rows, positions = text_codes.find_distinct(text_codes.read_codes(column.cast(pl.Categorical)))
    numbers: np.ndarray = positions.astype(np.int64)
    numbers[positions < 0] = rows.size
    return numbers


def to_array(column: pl.Series, null: int) -> np.ndarray:
    """Return an integer column as an array, in which the argument ``null`` replaces null."""
    if not column.null_count():
        return column.to_numpy()
    if column.dtype not in _INTEGERS:
        return column.cast(pl.Int64).fill_null(null).to_numpy()
    return _native.filled(column, null)


def encode_utf8(column: pl.Series) -> tuple[np.ndarray, np.ndarray]:
    """Return the UTF-8 bytes of the texts of a column without nulls: offsets (int64, one more than rows) and bytes.

    Python encodes them: to import pyarrow, which could share the memory, takes longer.
    """
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(column.str.len_bytes().to_numpy(), out=offsets[1:])
    text = column.str.join("").item() or ""
    return offsets, np.frombuffer(text.encode(), np.uint8)


def is_present(column: pl.Series) -> np.ndarray:
    """Return a mask of the rows of a column that are not null."""
    if not column.null_count():
        return np.ones(len(column), np.bool_)
    if column.null_count() == len(column):
        return np.zeros(len(column), np.bool_)
    if column.dtype == pl.Categorical:  # polars encodes the texts again when it exports them
        return column.is_not_null().to_numpy()
    return _native.present(column)


def rows_of_ids(
    table: pl.DataFrame, ids: pl.Series, dtype: type[np.int64] | type[np.int32] = np.int64
) -> np.ndarray:
    """Return the row number of each id in a table, -1 for null and for an id that is not in the table.

    Args:
        table: A table with a column ``id``, in any order; of several rows of one id the first counts.
        ids: The ids to look up.
        dtype: The type of the rows; int32 saves memory and a copy where the table has fewer rows than that.
    """
    rows: np.ndarray
    if table["id"].null_count():  # of a table that no reader checked
        present = np.flatnonzero(is_present(table["id"]))
        rows = rows_of_ids(table.select("id").drop_nulls(), ids, dtype)
        return np.where(rows < 0, -1, present[rows]).astype(dtype) if present.size else rows
    table_ids = table["id"].to_numpy()
    size = int(table_ids.max()) + 1 if table_ids.size else 0
    if dtype is np.int32 and ids.dtype == pl.UInt32:
        rows = _native.filled_int32(ids, -1) if ids.null_count() else ids.to_numpy().view(np.int32)
    else:
        rows = to_array(ids, -1).astype(dtype)
    if size > 64 * table_ids.size + 4096:  # sparse ids: a lookup table would be as large as the greatest id
        order = np.argsort(table_ids, kind="stable")
        candidates = order[np.minimum(np.searchsorted(table_ids[order], rows), table_ids.size - 1)]
        return np.where(table_ids[candidates] == rows, candidates, -1).astype(dtype)
    if rows.max(initial=-1) >= size or rows.min(initial=-1) < -1:  # a file may hold any number as an id
        rows = np.where((rows >= 0) & (rows < size), rows, dtype(-1))
    # In a table that is complete the ids are the row numbers.
    if not (size == table_ids.size and size and table_ids[0] == 0 and (table_ids[1:] > table_ids[:-1]).all()):
        row_by_id = np.full(size + 1, -1, dtype=dtype)  # the last entry stands for -1
        row_by_id[table_ids[::-1]] = np.arange(table_ids.size, dtype=dtype)[::-1]
        rows = row_by_id[rows]
    return rows


def find_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct numbers of an array in order, the position of the first of each, and the number of each.

    `numpy.unique` imports numpy.ma for that, which takes 10 ms.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: ordered.size])
    return ordered[starts], order[starts], np.diff(np.append(starts, ordered.size))


def mask_members(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a mask of the numbers that are among ``others``; see `find_values` about `numpy.isin`."""
    if not others.size:
        return np.zeros(values.size, np.bool_)
    ordered = np.sort(others)
    mask: np.ndarray = ordered[np.minimum(np.searchsorted(ordered, values), ordered.size - 1)] == values
    return mask


def find_unique(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the position in ``keys`` of each number of ``wanted`` that occurs there once; count repeated keys.

    Args:
        keys: Positive integers.
        wanted: Integers to look up; the position is -1 for those that no key or several keys are equal to.
    """
    size = int(keys.max(initial=0)) + 1
    positions = np.arange(keys.size)
    if size > 64 * keys.size + 4096:  # sparse keys: a lookup table would be as large as the greatest
        distinct, first, counts = find_values(keys)
        at = np.minimum(np.searchsorted(distinct, wanted), max(distinct.size - 1, 0))
        is_unique = (distinct[at] == wanted) & (counts[at] == 1)
        return np.where(is_unique, first[at], -1), keys.size - distinct.size
    position_by_key = np.full(size + 1, -1, np.int64)  # the last entry is for greater numbers
    position_by_key[keys] = positions
    repeated = np.flatnonzero(position_by_key[keys] != positions)
    position_by_key[keys[repeated]] = -1
    return position_by_key[np.clip(wanted, 0, size)], repeated.size


def pair_equal(values: np.ndarray, ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of all pairs of equal elements of two arrays, of which the second is sorted."""
    low, high = (np.searchsorted(ascending, values, side=side) for side in ("left", "right"))
    counts = high - low
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(values.size), counts), np.repeat(low, counts) + within


def find_in_group(
    groups: np.ndarray,
    times: np.ndarray,
    query_groups: np.ndarray,
    query_times: np.ndarray,
    *,
    after: bool = False,
) -> np.ndarray:
    """Return the index of the last row of a group that is not after a time, for each query of a group and a time.

    Args:
        groups: The group of each row, a number from 0.
        times: The time of each row, ascending; of equal times the later row is the later one.
        query_groups: The group of each query.
        query_times: The time of each query.
        after: Return the first row that is not before the time instead.

    Returns:
        int64, -1 if the group has no such row.
    """
    n = groups.size
    if not n:
        return np.full(query_groups.size, -1)
    # A row's key is its group, then its place in time; so that of a time is the number of rows before it.
    by_group = np.argsort(groups, kind="stable")
    groups, query_groups = groups.astype(np.int64), query_groups.astype(np.int64)
    keys = groups[by_group] * (n + 1) + by_group
    places = np.searchsorted(times, query_times, side="left" if after else "right")
    index = np.searchsorted(keys, query_groups * (n + 1) + places) - (0 if after else 1)
    rows = by_group[np.clip(index, 0, n - 1)]
    return np.where((index >= 0) & (index < n) & (groups[rows] == query_groups), rows, -1)


def sort_rows(keys: np.ndarray, *tie_breakers: np.ndarray) -> np.ndarray:
    """Return row numbers sorted by ``keys``; equal keys are sorted by the tie breakers, then by row number.

    It is as `np.lexsort` (with the first key first), but takes the further keys of ties only.
    """
    order = np.argsort(keys, kind="stable")
    values = keys[order]
    same = values[1:] == values[:-1]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        rows = order[tied]
        order[tied] = rows[np.lexsort([*(key[rows] for key in reversed(tie_breakers)), keys[rows]])]
    return order


def group_rows(values: np.ndarray) -> list[np.ndarray]:
    """Return one array of ascending row numbers per distinct value, in order of first occurrence of the values."""
    _, firsts, codes = np.unique(values, return_index=True, return_inverse=True)
    rows = np.argsort(codes, kind="stable")
    groups = np.split(rows, np.cumsum(np.bincount(codes))[:-1])
    return [groups[code] for code in np.argsort(firsts, kind="stable")]


def select_values(values: np.ndarray, rows: np.ndarray, absent: int = -1) -> np.ndarray:
    """Return ``values[row]`` for each row number; ``absent`` if the number is negative or ``values`` is empty."""
    if not values.size:
        return np.full(rows.shape, absent, values.dtype)
    selected: np.ndarray = np.where(rows >= 0, values[rows], values.dtype.type(absent))
    return selected


def make_frame(columns: Mapping[str, np.ndarray | pl.Series]) -> pl.DataFrame:
    """Return a table of one or more columns of equal length by name; see `join_columns`."""
    return join_columns(
        to_series(values, name) if isinstance(values, np.ndarray) else values.alias(name)
        for name, values in columns.items()
    )


def to_series(values: np.ndarray, name: str = "") -> pl.Series:
    """Return an array, which must not be modified afterwards, as a column.

    `pl.Series` imports numpy.ma for that, which takes 10 ms.
    """
    return pl.Series(_native.column(np.ascontiguousarray(values))).alias(name)


def join_columns(columns: Iterable[pl.Series]) -> pl.DataFrame:
    """Return a table of one or more columns of equal length.

    Polars' constructor takes ten times as long for few rows.
    """
    first, *others = columns
    return first.to_frame().hstack(others)


_Table = TypeVar("_Table", pl.Series, pl.DataFrame)


def take_rows(table: _Table, rows: np.ndarray) -> _Table:
    """Return the rows of a column or table at the row numbers ``rows``; -1 yields a row of nulls."""
    return table[pl.Series("", _native.row_indexes(rows))]
