"""Masks of text columns by code agree with polars' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom.core import text_codes
from etloom.core.arrays import is_in, map_text, match_text
from support.examples import examples

TEXTS = ["aten::add", None, "nccl:all_reduce", "aten::add", "", "cudaLaunchKernel", None, "aten::mul"]


def _column(texts: list[str | None]) -> pl.Series:
    return pl.Series("name", texts, dtype=pl.Categorical)


@pytest.mark.parametrize("texts", [TEXTS, [text for text in TEXTS if text is not None], [], [None, None]])
@pytest.mark.parametrize("values", [["aten::add"], ["aten::add", ""], ["a", "b", "aten::mul"], []])
def test_values_match_as_with_polars(texts: list[str | None], values: list[str]) -> None:
    expected = [text in values for text in texts]
    assert is_in(_column(texts), values).tolist() == expected
    assert is_in(pl.Series("name", texts, dtype=pl.String), values).tolist() == expected
    assert text_codes.CodedColumn(_column(texts)).match_values(values).tolist() == expected


def test_many_values_match_as_with_polars() -> None:
    values = [f"text {i}" for i in range(100)]
    assert is_in(_column(["text 7", None, "text 100"]), values).tolist() == [True, False, False]


@pytest.mark.parametrize("pattern", ["^aten::", "nccl|Launch", "^$", "no such text"])
@pytest.mark.parametrize("first_rows", [2, 1 << 15])
def test_a_pattern_matches_as_with_polars_also_texts_that_occur_later(
    monkeypatch: pytest.MonkeyPatch, pattern: str, first_rows: int
) -> None:
    monkeypatch.setattr(text_codes, "_FIRST_ROWS", first_rows)
    for number in range(3):
        new = f"{pattern} {first_rows} {number}"
        texts = [*TEXTS, f"aten::new{new}", f"Launch {new}", *TEXTS[: 2 * number]]
        column = _column(texts)
        expected = pl.Series(texts, dtype=pl.String).str.contains(pattern).fill_null(False).to_list()
        assert match_text(column, pattern).tolist() == expected
        assert text_codes.CodedColumn(column).match_pattern(pattern).tolist() == expected
        assert match_text(column, lambda name: name.str.contains(pattern)).tolist() == expected
        for step in (2, 5):  # many rows, few rows
            within = np.arange(len(texts)) % step == 0
            expected_within = [match and bool(inside) for match, inside in zip(expected, within, strict=True)]
            assert match_text(column, pattern, within).tolist() == expected_within


def test_texts_of_great_codes_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_codes, "_MAX_KEPT", 0)
    text_codes._tabulate_values.cache_clear()
    try:
        column = _column(TEXTS)
        assert match_text(column, "^aten::m").tolist() == [text == "aten::mul" for text in TEXTS]
        assert is_in(column, ["aten::mul", "x", "y"]).tolist() == [text == "aten::mul" for text in TEXTS]
        coded = text_codes.CodedColumn(column)
        assert coded.match_pattern("^aten").tolist() == [bool(text and "aten" in text) for text in TEXTS]
    finally:
        text_codes._tabulate_values.cache_clear()


@settings(max_examples=examples(100))
@given(
    codes=st.lists(
        st.sampled_from((0, 1, 5, 65_535, 10**8, text_codes.ABSENT - 1, text_codes.ABSENT)), max_size=8
    )
)
def test_distinct_rows_of_a_column(codes: list[int]) -> None:
    """Codes far above the number of rows are sorted instead of tabulated."""
    rows, positions = text_codes.find_distinct(np.array(codes, np.uint32))
    distinct = sorted({*codes} - {text_codes.ABSENT})
    assert [codes[row] for row in rows] == distinct
    assert positions.tolist() == [-1 if code == text_codes.ABSENT else distinct.index(code) for code in codes]


def test_a_function_of_texts_sees_null_once() -> None:
    column = _column(TEXTS)
    new = map_text(column, lambda name: pl.coalesce(name.str.extract("^(aten)"), pl.lit("other")))
    expected = ["aten" if text and text.startswith("aten") else "other" for text in TEXTS]
    assert new.to_list() == expected
    assert (new.name, new.dtype) == ("name", pl.Categorical)


def test_a_table_that_another_thread_replaces_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    table = text_codes._TextTable(pl.col("text").cast(pl.String).str.contains("2"))
    column = pl.Series([f"table {i}" for i in range(30)], dtype=pl.Categorical)
    codes = text_codes.read_codes(column)
    full = np.full

    def replace_table(size: int, value: int, *arguments: Any) -> Any:
        table._by_code = full(100 * size, np.uint8(255))
        return full(size, value, *arguments)

    monkeypatch.setattr(text_codes.np, "full", replace_table)
    assert table.look_up(column, codes).tolist() == ["2" in text for text in column]
