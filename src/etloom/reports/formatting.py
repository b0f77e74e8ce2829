"""Formats numbers and table columns with units, by the same rules for the HTML report and the terminal.

Columns whose names end in ``_ns`` or ``_bytes`` use one unit, that of the largest value of the table; a column whose
values are too small for it uses its own. Other columns have the unit in their name (`etloom.core.schema`). Epoch times
are shown relative to the first one in the table.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import polars as pl

from etloom.core.schema import find_unit
from etloom.core.text import SIZE_UNITS, TIME_UNITS, choose_unit, format_number

EPOCH_NS = 10**18
"""A time in 2001: no duration and no clock relative to a session reaches it."""
_COMPARED_SUFFIXES = ("before_ns", "after_ns", "change_ns")
_MIN_IN_UNIT = 0.01
"""Minimum of the largest value of a column in the unit of its table."""
IDENTIFIER_COLUMNS = frozenset({"rank", "step", "stream", "correlation", "node", "event", "device"})
"""Columns of numbers that identify something: never grouped by thousands."""
_UNIT_SUFFIX = r"(?:^|_)(?:pct|ppm|[a-z]+_per_s)$"
"""The end of a name that states only the unit, which the header formats in its own way."""


@dataclass(frozen=True)
class ColumnFormat:
    """The format of a table column: its header with unit, and the conversion of values to text."""

    header: str
    factor: float
    number: bool
    grouped: bool
    zero: int = 0  # subtracted from each value

    def text(self, value: Any) -> str:
        """Format a value in the unit of the column; empty for null and NaN."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        if isinstance(value, bool) or not self.number:
            return str(value)
        value -= self.zero
        if self.factor == 1 and isinstance(value, int):
            return f"{value:,}" if self.grouped else str(value)
        return format_number(value / self.factor)


@dataclass(frozen=True)
class RawFormat:
    """The format of a column of an SQL result, which shows values without conversion of units."""

    header: str
    number: bool

    def text(self, value: Any) -> str:
        """Format a value without conversion of its unit; empty for null and NaN."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        return f"{float(value):.12g}" if isinstance(value, (float, Decimal)) else str(value)


def choose_column_format(frame: pl.DataFrame, name: str) -> ColumnFormat:
    """Choose the header, unit and grouping of a table column from its name and the values of the table."""
    numeric = frame[name].dtype.is_numeric()
    for suffix, units in (("_ns", TIME_UNITS), ("_bytes", SIZE_UNITS)):
        if _has_unit(frame[name], suffix):
            tops = {
                column.name: _largest_magnitude(frame, column)
                for column in frame
                if _has_unit(column, suffix)
            }
            # A larger unit only from 10 on, so that most values have a digit before the point.
            unit, factor = choose_unit(max(tops.values()) / 10, units)
            top = max(tops[column] for column in _columns_sharing_unit(frame, name))
            if 0 < top < _MIN_IN_UNIT * factor:
                unit, factor = choose_unit(top / 10, units)
            zero = _epoch_origin(frame) if _is_epoch_time(frame[name]) else 0
            label = name.removesuffix(suffix).replace("_", " ") + (" since the first" if zero else "")
            return ColumnFormat(f"{label} ({unit})", factor, True, True, zero)
    name_unit = find_unit(name) if numeric else None
    label = (re.sub(_UNIT_SUFFIX, "", name) if name_unit else name).replace("_", " ")
    header = f"{label} ({name_unit})" if name_unit and label else name_unit or label
    return ColumnFormat(header, 1, numeric, name not in IDENTIFIER_COLUMNS)


def convert_to_own_units(frame: pl.DataFrame) -> pl.DataFrame:
    """Convert the columns before, after and change, row by row, to a readable unit: 1,009 ms, not 1,008,570,000 ns.

    The column ``unit`` states the unit of a row."""
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


def _has_unit(column: pl.Series, suffix: str) -> bool:
    return (column.name.endswith(suffix) or column.name == suffix[1:]) and column.dtype.is_numeric()


def _columns_sharing_unit(frame: pl.DataFrame, name: str) -> list[str]:
    """Return the columns that must share a unit with the column ``name``: those for before, after and change."""
    suffix = next((column for column in _COMPARED_SUFFIXES if name.endswith(column)), None)
    if suffix is None:
        return [name]
    stem = name.removesuffix(suffix)
    return [f"{stem}{column}" for column in _COMPARED_SUFFIXES if f"{stem}{column}" in frame.columns]


def _largest_magnitude(frame: pl.DataFrame, column: pl.Series) -> float:
    """Return the largest absolute value of a column as displayed (epoch times are relative to the first)."""
    zero = _epoch_origin(frame) if _is_epoch_time(column) else 0
    ends: tuple[Any, ...] = (column.min(), column.max())
    return max((float(abs(end - zero)) for end in ends if end is not None), default=0.0)


def _epoch_origin(frame: pl.DataFrame) -> int:
    """Return the earliest epoch time (ns) in a table, from which all its epoch times are counted."""
    times = [
        column
        for column in frame
        if column.name.endswith("_ns") and column.dtype.is_numeric() and _is_epoch_time(column)
    ]
    return min(int(column.min()) for column in times)  # type: ignore[arg-type]


def _is_epoch_time(column: pl.Series) -> bool:
    first: Any = column.min()
    return first is not None and first > EPOCH_NS
