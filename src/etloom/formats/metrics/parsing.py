"""Parsing of tables of metrics (CSV, JSON lines, Parquet), and of their times as nanoseconds."""

from __future__ import annotations

import csv
import io
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.parquet_errors import PARQUET_ERRORS
from etloom.core.schema import Stat
from etloom.core.text import NS_PER_UNIT
from etloom.formats.io.json_text import load_json
from etloom.formats.io.parquet_input import check_parquet

TIME_NAMES = (
    *("timestamp", "time", "ts", "datetime", "date", "#time"),
    *(f"{name}_{unit}" for unit in NS_PER_UNIT for name in ("timestamp", "time", "ts")),
)
PARQUET = b"PAR1"
NUMBER = r"^\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s].*)?$"
"""A number and optionally its unit: 45 %"""

_ABSENT = {"", "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "nan", "null", "None", "-"}
_CONVERT = "etloom convert FILE OUT.parquet"
_LATEST = 1 << 62
_DATE = re.compile(r"^\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d")
_DATES = ("%Y/%m/%d %H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f")


def normalize_name(name: str) -> str:
    """Return a column's name in lower case without quotes and unit: ' memory.used [MiB]' -> 'memory.used'."""
    name = name.strip().strip('"').strip()
    if name.endswith(("]", ")")):
        name = re.split(r"[\[(]", name, maxsplit=1)[0]
    return name.strip().lower()


def starts_with_date(line: str) -> bool:
    """Return whether a line begins with a date and time: then it is a row of samples, not a header."""
    return _DATE.match(line.lstrip('" ')) is not None


def parse_table(data: bytes, path: Path, stats: list[Stat]) -> pl.DataFrame:
    """Parse a Parquet, JSON lines or CSV file to a table with its original column names. Raises ReadError."""
    try:
        if data.startswith(PARQUET):
            check_parquet(data, path)
            table = pl.read_parquet(io.BytesIO(data))
            nested = [name for name, dtype in table.schema.items() if dtype.is_nested() or dtype == pl.Binary]
            return table.drop(nested).with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
        if data.lstrip()[:1] == b"{":
            return _parse_json_lines(data, stats)
        return _parse_csv(data, stats)
    except (*PARQUET_ERRORS, csv.Error) as error:
        raise ReadError(f"is not a table of metrics: {str(error).splitlines()[0]}", where=path) from None


def _parse_json_lines(data: bytes, stats: list[Stat]) -> pl.DataFrame:
    rows, bad = [], 0
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            row = load_json(line)
        except (ValueError, RecursionError):
            bad += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad += 1
    stats.append(Stat("read.metrics_invalid_line", "data_loss", bad, "not a JSON object"))
    names = dict.fromkeys(name for row in rows for name in row)
    return pl.DataFrame({name: _build_column([row.get(name) for row in rows]) for name in names})


def _build_column(values: list[Any]) -> pl.Series:
    """Build a numeric column if all values are numbers, otherwise a text column."""
    present = [value for value in values if value is not None]
    if all(isinstance(value, int) for value in present):
        return pl.Series(values, dtype=pl.Int64, strict=False)
    if all(isinstance(value, (int, float)) for value in present):
        return pl.Series(values, dtype=pl.Float64, strict=False)
    return pl.Series([None if value is None else str(value) for value in values], dtype=pl.String)


def _parse_csv(data: bytes, stats: list[Stat]) -> pl.DataFrame:
    """Parse CSV line by line, so that an unmatched quote invalidates its line, not the rest of the file."""
    lines = [line for line in data.decode("utf-8", "replace").lstrip("\ufeff").splitlines() if line.strip()]
    if not lines:
        raise ValueError("the table is empty")
    first = next(csv.reader(lines[:1], skipinitialspace=True))
    has_header = not starts_with_date(lines[0])
    names = [name.strip() for name in first] if has_header else [f"column_{i + 1}" for i in range(len(first))]
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    rows, bad = [], 0
    for line in lines[has_header:]:
        try:
            row = next(csv.reader([line], skipinitialspace=True))
        except csv.Error:
            row = []
        if len(row) == len(names):
            rows.append([None if (cell := text.strip()) in _ABSENT else cell for text in row])
        else:
            bad += 1
    stats.append(
        Stat("read.metrics_invalid_line", "data_loss", bad, f"lines that do not have {len(names)} cells")
    )
    return pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String), orient="row")


def find_time_column(table: pl.DataFrame, requested: str | None, path: Path) -> str:
    """Return the name of the time column: the requested one, or one of `TIME_NAMES`. Raises ReadError."""
    if requested is not None:
        if requested in table.columns:
            return requested
        raise ReadError(
            f"has no column {requested!r}", where=path, remedy=f"columns: {', '.join(table.columns)}"
        )
    if not table.width:
        raise ReadError(
            "has no columns of numbers or text (nested columns are not read)",
            where=path,
            remedy="write a column of times and one per metric",
        )
    if table.height and starts_with_date(str(table.item(0, 0))):
        return table.columns[0]
    columns = {normalize_name(name): name for name in reversed(table.columns)}
    for candidate in TIME_NAMES:
        if candidate in columns:
            return columns[candidate]
    raise ReadError(
        "no column has a name that is used for times",
        where=path,
        remedy=f"{_CONVERT} --time-column NAME, one of: {', '.join(table.columns)}",
    )


def parse_times(column: pl.Series, unit: str | None, utc_offset: float, path: Path) -> tuple[pl.Series, bool]:
    """Convert a column of times to int64 ns; also return whether it has dates without a time zone."""
    shift = round(utc_offset * 3600 * NS_PER_UNIT["s"])
    suffix = normalize_name(column.name).rpartition("_")[2]
    unit = unit or (suffix if suffix in NS_PER_UNIT else None)
    if column.dtype in (pl.Duration, pl.Time):  # since the start of the samples, or of the day
        return column.cast(pl.Duration("ns")).cast(pl.Int64), False
    if column.dtype.is_temporal():
        aware = isinstance(column.dtype, pl.Datetime) and column.dtype.time_zone is not None
        ns = column.cast(pl.Datetime("ns", "UTC" if aware else None)).cast(pl.Int64)
        return (ns if aware else ns - shift), not aware
    texts = column.cast(pl.String)
    numbers = texts.cast(pl.Float64, strict=False)
    if texts.null_count() == texts.len():
        return texts.cast(pl.Int64), False
    if numbers.null_count() == numbers.len():
        return _parse_dates(texts, shift, path)
    return _scale_numbers(texts, numbers, unit, path), False


def _scale_numbers(texts: pl.Series, numbers: pl.Series, unit: str | None, path: Path) -> pl.Series:
    if unit is None:
        # The size of an epoch time shows its unit: seconds have 10 digits today, nanoseconds 19.
        size = max((abs(number) for number in numbers.drop_nulls() if math.isfinite(number)), default=0.0)
        unit = next(
            (u for u, least in (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 1e8)) if size >= least), None
        )
    if unit is None:
        raise ReadError(
            f"unknown unit of {texts.name!r}",
            where=path,
            remedy=f"{_CONVERT} --time-column {texts.name} --unit UNIT, one of ns, us, ms, s",
        )
    return pl.Series([_scale_exactly(text, NS_PER_UNIT[unit]) for text in texts], dtype=pl.Int64)


def _scale_exactly(text: str | None, scale: int) -> int | None:
    """Multiply a number, stored as decimal text, by ``scale`` without floating-point rounding; None if invalid."""
    try:
        time = Decimal(text or "") * scale
    except ArithmeticError:
        return None
    return int(time.to_integral_value()) if time.is_finite() and abs(time) <= _LATEST else None


def _parse_dates(texts: pl.Series, shift: int, path: Path) -> tuple[pl.Series, bool]:
    for form in _DATES:
        zoned = texts.str.to_datetime(form + "%#z", time_unit="ns", strict=False)
        if zoned.null_count() < zoned.len():
            return zoned.cast(pl.Int64), False
        zoneless = texts.str.to_datetime(form, time_unit="ns", strict=False)
        if zoneless.null_count() < zoneless.len():
            return zoneless.cast(pl.Int64) - shift, True
    raise ReadError(f"column {texts.name!r} is not a time: {texts.drop_nulls()[0]!r}", where=path)
