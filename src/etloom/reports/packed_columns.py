"""Packs columns of integers for the scripts of pages.

``data.js`` unpacks what `frame_columns` returns:

    gzip( u32 length of the header | header (JSON) | columns )

The header lists the columns as [name, form, number of values, bytes per value, whether they are differences]. Each
integer, or its difference from the one before, is mapped to a natural number (0, -1, 1, -2, ... to 0, 1, 2, 3, ...).
The lowest bytes of all values come first, then the next ones, and so on: bytes of equal weight resemble each other, so
they compress better than whole words. Integers up to 2^53 are exact; the page holds greater ones as 64-bit floats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from isal import igzip_lib

from etloom.core.arrays import to_array

FORMS = ("u8", "u32", "signed", "wide")
"""Forms of a column. ``u8``, ``u32``: natural numbers, null as 0. ``signed``: integers, null as 0. ``wide``: natural
numbers, null as -1."""
_MAX_EXACT = 1 << 52
"""The page adds differences as 64-bit floats; larger values are not stored as differences."""
_LEVEL = 3
_NULL = np.iinfo(np.int64).min


class Column(NamedTuple):
    """An encoded column: name, form, number of values, bytes per value, whether they are differences, bytes."""

    name: str
    form: str
    size: int
    width: int
    is_difference: bool
    data: bytes


def encode_column(name: str, form: str, values: pl.Series, *, by_difference: bool = False) -> Column:
    """Encode a column of integers as bytes.

    Args:
        name: of the column on the page.
        form: one of `FORMS`.
        values: the integers. Negative ones become 0 in the form ``wide``.
        by_difference: store the differences between neighbors, for values that resemble those before.
    """
    numbers = to_array(values, _NULL).astype(np.int64)
    is_null = numbers == _NULL
    if form == "wide":
        numbers = np.maximum(numbers, 0)
    numbers = np.where(is_null, -1 if form == "wide" else 0, numbers)
    by_difference = by_difference and int(np.abs(numbers).max(initial=0)) < _MAX_EXACT
    if by_difference:
        numbers = np.diff(numbers, prepend=0)
    naturals = ((numbers << 1) ^ (numbers >> 63)).astype("<i8").view("<u8")
    width = -(-int(naturals.max(initial=0)).bit_length() // 8)
    planes = naturals.view("u1").reshape(-1, 8)[:, :width].T
    return Column(name, form, len(numbers), width, by_difference, planes.tobytes())


def frame_columns(header: dict[str, Any], columns: Sequence[Column], *, is_compressed: bool = True) -> bytes:
    """Return header and columns as bytes, in the form that the module's docstring describes."""
    header["columns"] = [list(column[:-1]) for column in columns]
    text = json.dumps(header, separators=(",", ":")).encode()
    content = len(text).to_bytes(4, "little") + text + b"".join(column.data for column in columns)
    if not is_compressed:
        return content
    return bytes(igzip_lib.compress(content, level=_LEVEL, flag=igzip_lib.COMP_GZIP))
