"""How numbers and columns are said to people: one rule for the page and the terminal.

Columns whose names end in ``_ns`` or ``_bytes`` are shown in one unit, that of the largest value of the table; one
whose values are too small for it in a unit of its own. Others have the unit that their name says
(`etloom.core.schema.find_unit`). Times of the epoch are shown since the first of the table.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.core.schema import find_unit

TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
SIZE_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
EPOCH_NS = 10**18
"""A time after 2001: no duration, and no clock relative to a session, reaches it."""
_COMPARED_SUFFIXES = ("before_ns", "after_ns", "change_ns")
_MIN_IN_UNIT = 0.01
"""What the largest value of a column must come to in the unit of its table."""
IDENTIFIER_COLUMNS = frozenset({"rank", "step", "stream", "correlation", "node", "event", "device"})
"""Columns of numbers that name something: never grouped by thousands."""
_UNIT_SUFFIX = r"(?:^|_)(?:pct|ppm|[a-z]+_per_s)$"
"""The end of a name that says the unit and nothing else, which the header says in its own way."""


@dataclass(frozen=True)
class ColumnFormat:
    """A column as it is shown: its header, and a value's text."""

    header: str
    factor: float
    number: bool
    grouped: bool
    zero: int = 0  # what is taken off each value

    def text(self, value: Any) -> str:
        """The text of a value; an empty one for null and for what is no number."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        if isinstance(value, bool) or not self.number:
            return str(value)
        value -= self.zero
        if self.factor == 1 and isinstance(value, int):
            return f"{value:,}" if self.grouped else str(value)
        return format_number(value / self.factor)


def choose_column_format(frame: pl.DataFrame, name: str) -> ColumnFormat:
    """How a column of a table is shown."""
    numeric = frame.schema[name].is_numeric()
    for suffix, units in (("_ns", TIME_UNITS), ("_bytes", SIZE_UNITS)):
        if _has_unit(frame, name, suffix):
            tops = {one: _largest_shown(frame, one) for one in frame.columns if _has_unit(frame, one, suffix)}
            # A step up only from 10 on, so that most values have a digit before the point.
            unit, factor = choose_unit(max(tops.values()) / 10, units)
            top = max(tops[one] for one in _columns_sharing_unit(frame, name))
            if 0 < top < _MIN_IN_UNIT * factor:
                unit, factor = choose_unit(top / 10, units)
            zero = _epoch_origin(frame) if _is_epoch_time(frame[name]) else 0
            words = name.removesuffix(suffix).replace("_", " ") + (" since the first" if zero else "")
            return ColumnFormat(f"{words} ({unit})", factor, True, True, zero)
    said = find_unit(name) if numeric else None
    words = (re.sub(_UNIT_SUFFIX, "", name) if said else name).replace("_", " ")
    header = f"{words} ({said})" if said and words else said or words
    return ColumnFormat(header, 1, numeric, name not in IDENTIFIER_COLUMNS)


def convert_to_own_units(frame: pl.DataFrame) -> pl.DataFrame:
    """A table whose rows each name the ``unit`` of before, after and change, each in the one that suits it: 1,009 ms in
    place of 1,008,570,000 ns."""
    values = [name for name in ("before", "after", "change") if name in frame.columns]
    if "unit" not in frame.columns or not values:
        return frame
    rows = []
    for row in frame.iter_rows(named=True):
        units = {"ns": TIME_UNITS, "B": SIZE_UNITS}.get(row["unit"])
        if units is not None:
            unit, factor = choose_unit(max(abs(row[name] or 0) for name in values) / 10, units)
            row |= {"unit": unit} | {name: row[name] / factor for name in values if row[name] is not None}
        rows.append(row)
    return pl.DataFrame(rows, schema=frame.schema)


def _has_unit(frame: pl.DataFrame, name: str, suffix: str) -> bool:
    return frame.schema[name].is_numeric() and (name.endswith(suffix) or name == suffix[1:])


def _columns_sharing_unit(frame: pl.DataFrame, name: str) -> list[str]:
    """The columns whose unit is one with this column's in any case: what was before, what is after, the change."""
    end = next((one for one in _COMPARED_SUFFIXES if name.endswith(one)), None)
    if end is None:
        return [name]
    stem = name.removesuffix(end)
    return [f"{stem}{one}" for one in _COMPARED_SUFFIXES if f"{stem}{one}" in frame.columns]


def _largest_shown(frame: pl.DataFrame, name: str) -> float:
    """The largest size of what is shown of a column."""
    column = frame[name]
    top: Any = (column - _epoch_origin(frame) if _is_epoch_time(column) else column).abs().max()
    return float(top or 0)


def _epoch_origin(frame: pl.DataFrame) -> int:
    """The first of all times of the epoch in a table, so that its columns can be held against each other."""
    times = [
        one for one in frame if one.name.endswith("_ns") and one.dtype.is_numeric() and _is_epoch_time(one)
    ]
    return min(int(one.min()) for one in times)  # type: ignore[arg-type]


def _is_epoch_time(column: pl.Series) -> bool:
    first: Any = column.min()
    return first is not None and first > EPOCH_NS


def choose_unit(value: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """The largest unit that the value fills; the smallest for 0."""
    return next((unit for unit in units if abs(value) >= unit[1]), units[-1])


def format_number(value: float, digits: int = 4) -> str:
    """A number to so many significant digits; whole ones from 1000 on, grouped by thousands."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    decimals = 0 if value == 0 else max(0, min(6, digits - 1 - math.floor(math.log10(size))))
    return f"{value + 0.0:.{decimals}f}"  # a zero without a sign


def format_duration(ns: float) -> str:
    """A time in the unit that suits it: 187.3 ms."""
    unit, factor = choose_unit(ns, TIME_UNITS)
    return f"{format_number(ns / factor)} {unit}"


def count_noun(number: int, noun: str) -> str:
    """2 steps, 1 step: the number grouped by thousands, the noun (which takes an s) in number with it."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
