"""Rows of text from parts, against a reference that joins the parts of each row."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom import _native
from support.examples import examples

Texts = tuple[np.ndarray | None, np.ndarray, np.ndarray]


def lay_out(texts: list[str], codes: list[int] | None = None) -> Texts:
    """The texts as codes, offsets and bytes."""
    encoded = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return None if codes is None else np.array(codes, np.int32), offsets, data


@st.composite
def rows_and_parts(draw: st.DrawFn) -> tuple[list[Any], list[list[str]]]:
    """Parts, and the texts that each row has of them."""
    rows = draw(st.integers(0, 5))
    parts: list[Any] = []
    columns: list[list[str]] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(("constant", "numbers", "texts", "repeated")))
        if kind == "constant":
            parts.append(draw(st.text()))
            columns.append([parts[-1]] * rows)
        elif kind == "numbers":
            numbers = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows))
            parts.append(np.array(numbers, np.int64))
            columns.append(list(map(str, numbers)))
        elif kind == "texts":
            columns.append(draw(st.lists(st.text(), min_size=rows, max_size=rows)))
            parts.append(lay_out(columns[-1]))
        else:
            texts = draw(st.lists(st.text(), min_size=1, max_size=3))
            codes = draw(st.lists(st.integers(0, len(texts) - 1), min_size=rows, max_size=rows))
            parts.append(lay_out(texts, codes))
            columns.append([texts[code] for code in codes])
    return parts, [[column[row] for column in columns] for row in range(rows)]


@settings(max_examples=examples(200))
@given(rows_and_parts())
def test_each_row_has_its_parts(case: tuple[list[Any], list[list[str]]]) -> None:
    parts, rows = case
    offsets, data = _native.row_texts(parts, len(rows))
    texts = [bytes(data[begin:end]).decode() for begin, end in itertools.pairwise(offsets)]
    assert texts == ["".join(row) for row in rows]
    assert len(data) == offsets[-1]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (np.zeros(1, np.int64), "a number per row"),
        (lay_out(["a"]), "a text per row"),
        (lay_out(["a"], [0]), "a text per row"),
        (lay_out(["a"], [0, 1]), "there is no such text"),
        (lay_out(["a"], [0, -1]), "there is no such text"),
        (lay_out([], [0, 0]), "there is no such text"),
        ((None, np.array([0, 2, 1]), np.zeros(2, np.uint8)), "the offsets are not those of the texts"),
        ((None, np.array([0, 1, 3]), np.zeros(2, np.uint8)), "the offsets are not those of the texts"),
        ((None, np.array([-1, 1, 2]), np.zeros(2, np.uint8)), "the offsets are not those of the texts"),
        ((None, np.zeros(0, np.int64), np.zeros(2, np.uint8)), "the offsets are not those of the texts"),
    ],
)
def test_parts_that_do_not_fit_the_rows_are_refused(part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _native.row_texts([part], 2)
