"""Native columns of codes against what numpy and obvious Python give."""

from __future__ import annotations

import gc
import sys

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etloom import _native
from etloom.core import arrays

CODES = st.lists(st.integers(0, 5), max_size=30).map(lambda codes: np.array(codes, np.uint32))
# Threads of several processes, and as many of each as do not fit what is remembered of the last ones.
VALUES = st.one_of(st.integers(-3, 3), st.integers(0, 500), st.sampled_from([-(2**63), 2**63 - 1]))


@given(CODES, st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_table_is_looked_up(codes, table):
    found = _native.looked_up(np.array(table, np.uint8), codes)
    assert found.tolist() == [int(table[code]) for code in codes]


@given(CODES, st.lists(st.booleans(), min_size=1, max_size=6))
def test_the_last_entry_is_that_of_greater_codes(codes, table):
    found = _native.looked_up(np.array(table, np.uint8), codes, clip=True)
    assert found.tolist() == [int(table[min(code, len(table) - 1)]) for code in codes]


@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_a_code_that_no_table_has_is_refused(place):
    codes = np.zeros(10_000, np.uint32)
    codes[place] = 7
    assert _native.looked_up(np.ones(8, np.uint8), codes).sum() == 10_000
    with pytest.raises(ValueError, match="no such code"):
        _native.looked_up(np.ones(7, np.uint8), codes)
    with pytest.raises(ValueError, match="no such code"):
        _native.codes_of(np.ones(10_000, bool), codes, 7)


@given(CODES, st.data())
def test_the_codes_of_marked_rows(codes, data):
    marked = np.array(data.draw(st.lists(st.booleans(), min_size=len(codes), max_size=len(codes))), bool)
    held = _native.codes_of(marked, codes, 6)
    assert held.tolist() == [int(code in codes[marked]) for code in range(6)]


@given(st.lists(st.tuples(VALUES, VALUES), max_size=200))
def test_pairs_are_numbered_in_their_order(pairs):
    columns = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    numbers = {pair: number for number, pair in enumerate(sorted(set(pairs)))}
    assert _native.number_pairs(*columns).tolist() == [numbers[pair] for pair in pairs]


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        _native.number_pairs(np.zeros(2, np.int64), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="differ in length"):
        _native.codes_of(np.zeros(2, bool), np.zeros(3, np.uint32), 1)


def test_many_distinct_pairs_are_numbered_as_few() -> None:
    draw = np.random.default_rng(3)
    first, second = draw.integers(-9_000, 9_000, 20_000), draw.integers(-1, 2, 20_000)
    expected = np.unique(np.stack([first, second], 1), axis=0, return_inverse=True)[1].ravel()
    assert (_native.number_pairs(first, second) == expected).all()


ARRAYS = st.one_of(
    st.sampled_from(
        [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
    ).flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 40))),
    hnp.arrays(np.float64, st.integers(0, 40), elements=st.floats(allow_nan=False)),
    hnp.arrays(np.bool_, st.integers(0, 40)),
)


@pytest.mark.slow
@given(ARRAYS, st.sampled_from([1, 2, -1]))
def test_arrays_become_columns(values: np.ndarray, stride: int) -> None:
    column = arrays.to_series(values[::stride], "x")
    assert column.equals(pl.Series("x", values[::stride]), check_names=True, check_dtypes=True)


@pytest.mark.slow
def test_columns_hold_their_arrays() -> None:
    values = np.arange(1000)
    references = sys.getrefcount(values)
    column = arrays.to_series(values)
    del values
    assert column.to_list() == list(range(1000))
    values = np.arange(1000)
    arrays.to_series(values)
    gc.collect()
    assert sys.getrefcount(values) == references


@pytest.mark.parametrize(
    "values", [np.arange(8)[::2], np.zeros((2, 2)), np.array(["a"]), np.zeros(2, "M8[ns]")]
)
def test_other_arrays_are_refused(values: np.ndarray) -> None:
    with pytest.raises(TypeError):
        _native.column(values)


def test_a_parser_takes_no_more_than_it_has_room_for() -> None:
    parser = _native.kineto_parser()
    parser.room(10)
    for size in (1 << 40, 2**64 - 1):
        with pytest.raises(ValueError, match="more bytes"):
            parser.extend(size)
    with pytest.raises(ValueError, match="more room"):
        parser.room(2**64 - 1)


@pytest.mark.slow
@given(st.lists(st.text(max_size=9), max_size=20))
def test_texts_become_a_column(texts: list[str]) -> None:
    encoded = [text.encode("utf-8", "replace") for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)])
    column = pl.Series(_native.text_column(offsets, np.frombuffer(b"".join(encoded), np.uint8)))
    assert column.dtype == pl.String
    assert column.to_list() == [text.decode() for text in encoded]


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 2, 1], [0, 4], [-1, 0]])
def test_wrong_offsets_of_texts_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        _native.text_column(np.array(offsets, np.int64), np.zeros(3, np.uint8))
