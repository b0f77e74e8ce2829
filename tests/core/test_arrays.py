"""Look-ups and orders of arrays, against obvious Python and numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etloom.core import arrays, nesting

# Close numbers are looked up in a table, numbers far from each other in a sorted array.
KEYS = st.one_of(st.integers(1, 12), st.sampled_from([10**6, 10**12, 2**62]))
NUMBERS = st.one_of(KEYS, st.integers(-3, 20))


@given(st.lists(KEYS, max_size=40), st.lists(NUMBERS, max_size=20))
def test_only_unique_keys_are_found(keys, wanted):
    counts = Counter(keys)
    positions, repeated = arrays.find_unique(np.array(keys, np.int64), np.array(wanted, np.int64))
    assert positions.tolist() == [keys.index(number) if counts[number] == 1 else -1 for number in wanted]
    assert repeated == len(keys) - len(counts)


@given(st.lists(NUMBERS, max_size=40))
def test_values_are_found_as_by_numpy(numbers):
    values = np.array(numbers, np.int64)
    expected = np.unique(values, return_index=True, return_counts=True)
    for column, wanted in zip(arrays.find_values(values), expected, strict=True):
        assert column.tolist() == wanted.tolist()


@given(st.lists(NUMBERS, max_size=40), st.lists(NUMBERS, max_size=10))
def test_numbers_are_among_others(numbers, others):
    mask = arrays.mask_members(np.array(numbers, np.int64), np.array(others, np.int64))
    assert mask.tolist() == [number in others for number in numbers]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=40))
def test_rows_are_sorted_by_all_keys(rows):
    first, second, third = np.array(rows, np.int64).reshape(-1, 3).T
    expected = np.lexsort((third, second, first))
    assert arrays.sort_rows(first, second, third).tolist() == expected.tolist()


@given(st.lists(st.integers(-2, 3), min_size=1, max_size=30))
def test_rows_are_grouped_by_first_occurrence(values):
    expected = [
        [row for row, other in enumerate(values) if other == value] for value in dict.fromkeys(values)
    ]
    assert [rows.tolist() for rows in arrays.group_rows(np.array(values))] == expected


WINDOWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4)


@given(WINDOWS, st.lists(st.integers(-1, 12), min_size=12, max_size=30))
def test_sorted_times_are_placed_as_others(windows, ticks):
    starts, ends = np.array(windows, np.int64).reshape(-1, 2).T
    in_order = np.sort(np.array(ticks, np.int64))
    placed = [int(nesting.find_innermost(starts, ends, [tick])[0]) for tick in in_order]
    assert nesting.find_innermost(starts, ends, in_order).tolist() == placed


@given(st.lists(st.integers(0, 99), max_size=5), st.data())
def test_values_of_absent_rows_are_absent(values, data):
    rows = data.draw(st.lists(st.integers(-1, len(values) - 1), max_size=8))
    selected = arrays.select_values(np.array(values, np.int32), np.array(rows, np.int64), -7)
    assert selected.tolist() == [values[row] if row >= 0 else -7 for row in rows]
    assert selected.dtype == np.int32


INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
CHUNKS = st.lists(st.lists(st.one_of(st.none(), st.integers(0, 127)), max_size=20), min_size=1, max_size=3)


@given(CHUNKS, st.sampled_from(INTEGERS), st.integers(0, 17))
def test_null_is_replaced_in_columns_of_several_chunks(chunks, dtype, start):
    column = pl.concat([pl.Series("n", values, dtype=dtype) for values in chunks], rechunk=False)[start:]
    values = [value for chunk in chunks for value in chunk][start:]
    assert arrays.to_array(column, -7).tolist() == [-7 if value is None else value for value in values]
    assert arrays.is_present(column).tolist() == [value is not None for value in values]
    as_text = column.cast(pl.String)
    assert arrays.is_present(as_text).tolist() == [value is not None for value in values]
    assert arrays.is_present(as_text.cast(pl.Categorical)).tolist() == [value is not None for value in values]


def test_the_extremes_of_a_type_remain():
    for dtype, extremes in ((pl.Int64, (-(2**63), 2**63 - 1)), (pl.UInt32, (0, 2**32 - 1))):
        column = pl.Series([*extremes, None], dtype=dtype)
        assert arrays.to_array(column, -1).tolist() == [*extremes, -1]


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9)), max_size=12)


@given(ROWS, ROWS)
def test_the_last_row_of_a_group_before_a_time(rows, queries):
    rows = sorted(rows, key=lambda row: row[1])
    groups, times = np.array(rows, np.int64).reshape(-1, 2).T
    query_groups, query_times = np.array(queries, np.int64).reshape(-1, 2).T
    last = [
        max((i for i, (group, time) in enumerate(rows) if group == wanted and time <= at), default=-1)
        for wanted, at in queries
    ]
    first = [
        min((i for i, (group, time) in enumerate(rows) if group == wanted and time >= at), default=-1)
        for wanted, at in queries
    ]
    assert arrays.find_in_group(groups, times, query_groups, query_times).tolist() == last
    assert arrays.find_in_group(groups, times, query_groups, query_times, after=True).tolist() == first


def test_many_groups_of_many_rows():
    groups = np.arange(60_000, dtype=np.int32)  # the square of their number exceeds 32 bits
    times = np.arange(60_000)
    assert (arrays.find_in_group(groups, times, groups[::-1], times[::-1]) == times[::-1]).all()


def test_a_column_of_nulls_only_has_no_value():
    for dtype in (pl.Null, pl.Int64, pl.Categorical):
        assert arrays.is_present(pl.Series([None, None], dtype=dtype)).tolist() == [False, False]


@given(st.lists(st.integers(0, 4), max_size=8), st.lists(st.integers(0, 4), max_size=8))
def test_all_pairs_of_equal_elements(values, ascending):
    ascending.sort()
    left, right = arrays.pair_equal(np.array(values, np.int64), np.array(ascending, np.int64))
    expected = [(i, j) for i, a in enumerate(values) for j, b in enumerate(ascending) if a == b]
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == expected


@given(st.lists(st.integers(-3, 9)), st.sampled_from([np.int64, np.int32]))
def test_rows_are_taken_by_number_and_negative_ones_are_null(rows: list[int], dtype: type) -> None:
    texts = pl.Series("text", [f"t{i}" for i in range(10)], dtype=pl.Categorical)
    table = pl.DataFrame({"text": texts, "number": range(10)})
    taken = arrays.take_rows(table, np.array(rows, dtype))
    assert taken.schema == table.schema
    assert taken["number"].to_list() == [None if row < 0 else row for row in rows]
    assert arrays.take_rows(texts, np.array(rows, dtype)).equals(taken["text"], null_equal=True)


def test_a_table_is_made_of_arrays_and_columns() -> None:
    frame = arrays.make_frame({"a": np.arange(3), "b": pl.Series("other", ["x", None, "y"])})
    assert frame.equals(pl.DataFrame({"a": [0, 1, 2], "b": ["x", None, "y"]}))
    with pytest.raises(pl.exceptions.ShapeError):
        arrays.make_frame({"a": np.arange(3), "b": np.arange(2)})
