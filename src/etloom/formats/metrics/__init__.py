"""Metrics recorded along with a trace: CSV, JSON lines, JSON or Parquet with a time column, as counters.

Supported: `nvidia-smi --query-gpu=timestamp,... --format=csv` with or without units and header line, DCGM samples
and any other table (one column per metric, or the columns metric and value), and the JSON of vLLM's
latency benchmark, which has durations without times.

Each numeric column is a counter; text columns and those with a device, rank or host identify its series. Dates without
a time zone are read as UTC, which is counted, unless ``utc_offset`` is set.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.text import NS_PER_UNIT
from etloom.core.trace import Trace
from etloom.formats import pipeline_operations
from etloom.formats.io.compression import SizeLimit, read_content
from etloom.formats.io.json_text import load_json
from etloom.formats.io.other_formats import identify
from etloom.formats.io.parquet_input import PARQUET_ERRORS, check_parquet, read_foreign
from etloom.formats.tables.building import build_trace

_KEYS = re.compile(
    r"^(index|gpu|gpu_?id|gpu_?uuid|uuid|device|entity|rank|local_rank|host|hostname|node|name|pci\.bus_id)$"
)
_LONG = (("metric", "value"), ("name", "value"), ("counter", "value"))
_EPOCH_NS = 10**18
_SNIFFED_ROWS = 10
_BEGINS_NUMBER = re.compile(r'[\s"]*[-+.]?\d')


def sniff(head: bytes) -> bool:
    """Return whether a file is Parquet, a table with a time column, or vLLM's JSON, by its first bytes ``head``.

    Parquet with the columns of a pipeline operation trace is left to the reader of these.
    """
    if head.startswith(PARQUET):
        return not pipeline_operations.sniff(head)
    if b"\0" in head or identify(head) is not None:
        return False
    text = head.decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    if text.startswith("{"):
        return _sniff_json(text)
    line, *rows = [line for line in text.splitlines() if line.strip()][:_SNIFFED_ROWS] or [""]
    # "Time (%)" is the share of a summary.
    names = ["" if "%" in name else normalize_name(name) for name in line.split(",")]
    if len(names) == 1 or starts_with_date(line):
        return len(names) > 1
    at = next((place for place, name in enumerate(names) if name in TIME_NAMES), None)
    # `import os, time` is not a header: in a table, some row has a number in the time column.
    return at is not None and (
        not rows or any(_BEGINS_NUMBER.match((row.split(",")[at:] or [""])[0]) for row in rows)
    )


def _sniff_json(text: str) -> bool:
    if '"avg_latency"' in text and '"latencies"' in text:
        return True
    first = text.split("\n", 1)[0]
    try:
        row = load_json(first)
    except (ValueError, RecursionError):
        return False
    # A line of a trace is an object too, but contains lists and objects.
    is_flat = isinstance(row, dict) and not any(isinstance(value, (dict, list)) for value in row.values())
    return is_flat and any(normalize_name(name) in TIME_NAMES for name in row)


def read(
    path: Path,
    *,
    time_column: Annotated[str | None, "The column with the time (default: one of the usual names)."] = None,
    unit: Annotated[
        str | None,
        "ns, us, ms or s, the unit of numeric times (default: inferred from the size of an epoch time).",
    ] = None,
    utc_offset: Annotated[float, "Hours by which dates without a time zone are ahead of UTC."] = 0.0,
    limit: SizeLimit = 1 << 30,
) -> Trace:
    """Read a table of metrics as counters: one row per sample and series, in time order.

    Raises:
        ReadError: The column does not exist, or it is not a time.
        LimitError: If the file is too large.
    """
    if unit is not None and unit not in NS_PER_UNIT:
        raise ReadError(f"unknown unit {unit!r}; expected one of {', '.join(NS_PER_UNIT)}", where=path)
    stats: list[Stat] = []
    data, damage = read_content(path, limit)
    if damage:
        stats.append(Stat("read.truncated", "data_loss", 1, damage))
    meta = {"formats": ["metrics"], "files": [str(path)]}
    if (latency := _parse_vllm_latency(data)) is not None:
        stats.append(
            Stat("read.metrics_without_time", "info", latency.height, "vLLM records durations without times")
        )
        return build_trace({"counters": latency}, meta | {"clock": "relative", "base_ns": 0}, stats)
    columns = parse_table(data, path, stats)
    name = find_time_column(columns, time_column, path)
    sample_times, zoneless = parse_times(columns[name], unit, utc_offset, path)
    if zoneless and not utc_offset:
        stats.append(
            Stat("read.metrics_assumed_utc", "info", columns.height, "dates without a time zone, read as UTC")
        )
    numbers = columns.drop(name).with_columns(
        pl.col(pl.Duration, pl.Time).cast(pl.Duration("ns")).cast(pl.Int64)
    )
    counters, wrong = _build_counters(numbers, sample_times)
    untimed = sample_times.null_count()
    stats += [
        Stat("read.metrics_invalid_time", "data_loss", untimed, f"rows whose {name} is not a time"),
        Stat("read.metrics_invalid_number", "data_loss", wrong, "cells that are not numbers"),
    ]
    first = counters["ts"].min()
    clock = "epoch" if isinstance(first, int) and first > _EPOCH_NS else "relative"
    return build_trace({"counters": counters}, meta | {"clock": clock, "base_ns": 0}, stats)


def _parse_vllm_latency(data: bytes) -> pl.DataFrame | None:
    """Parse the JSON of `vllm bench latency`: seconds per iteration, mean and percentiles; None for other data."""
    if not data.lstrip().startswith(b"{") or b'"avg_latency"' not in data:
        return None
    try:
        benchmark = load_json(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(benchmark, dict) or not isinstance(benchmark.get("avg_latency"), (int, float)):
        return None
    samples = benchmark.get("latencies")
    percentiles = benchmark.get("percentiles")
    rows: list[tuple[str, Any]] = [("mean", benchmark["avg_latency"])]
    rows += [
        (f"p{key}", value) for key, value in (percentiles if isinstance(percentiles, dict) else {}).items()
    ]
    rows += [("iteration", value) for value in (samples if isinstance(samples, list) else [])]
    values = [
        (series, float(value))
        for series, value in rows
        if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    ]
    frame = pl.DataFrame(values, schema={"series": pl.String, "value": pl.Float64}, orient="row")
    return frame.select(pl.lit("latency [s]").alias("name"), "series", "value").with_row_index("id")


def _build_counters(table: pl.DataFrame, times: pl.Series) -> tuple[pl.DataFrame, int]:
    """Convert each number in the table to a row of counters, in time order; also count cells that are not numbers."""
    names = {normalize_name(column): column for column in table.columns}
    long = next(((names[name], names[value]) for name, value in _LONG if {name, value} <= names.keys()), None)
    if long:
        keys = [column for column in table.columns if column not in long]
        rows = table.select(
            name=pl.col(long[0]).cast(pl.String), text=long[1], value=_parse_numbers(table, long[1])
        )
    else:
        keys = [
            column
            for column in table.columns
            if _KEYS.match(normalize_name(column)) or _is_text_column(table, column)
        ]
        if len(keys) > 1:  # the model of a GPU adds nothing to its index
            keys = [column for column in keys if normalize_name(column) != "name"]
        selected = [
            column
            for column in table.columns
            if not _KEYS.match(normalize_name(column)) and column not in keys
        ]
        rows = pl.concat(
            [
                table.select(
                    name=pl.lit(_add_unit(table, column)),
                    text=pl.col(column).cast(pl.String),
                    value=_parse_numbers(table, column),
                )
                for column in selected
            ]
            or [pl.DataFrame(schema={"name": pl.String, "text": pl.String, "value": pl.Float64})]
        )
    # The columns are concatenated vertically, so the times repeat every table.height rows.
    repeat = rows.height // table.height if table.height else 0
    labels = pl.concat(
        [pl.DataFrame({"ts": times, "series": _build_series_key(table, keys)})] * max(repeat, 1)
    )
    cells = pl.concat([labels.head(rows.height), rows], how="horizontal").filter(pl.col("ts").is_not_null())
    wrong = cells.filter(pl.col("text").is_not_null() & pl.col("value").is_null()).height
    counters = cells.filter(pl.col("value").is_not_null()).sort("ts", maintain_order=True)
    return counters.select("ts", "name", "series", "value").with_row_index("id"), wrong


def _parse_numbers(table: pl.DataFrame, column: str) -> pl.Expr:
    text = table.schema[column] == pl.String
    number = pl.col(column).str.extract(NUMBER, 1) if text else pl.col(column)
    return number.cast(pl.Float64, strict=False)


def _is_text_column(table: pl.DataFrame, column: str) -> bool:
    """Return whether a column has values but no numbers."""
    cells = table.select(text=column, number=_parse_numbers(table, column))
    return cells["number"].null_count() == cells.height > cells["text"].null_count()


def _add_unit(table: pl.DataFrame, column: str) -> str:
    """Return the column's name with its unit, from the header (memory.used [MiB]) or from the cells (45 %)."""
    if "[" in column or table.schema[column] != pl.String:
        return column
    units = table[column].str.extract(NUMBER, 2).drop_nulls().unique()
    return f"{column} [{units[0].strip()}]" if units.len() == 1 else column


def _build_series_key(table: pl.DataFrame, keys: list[str]) -> pl.Series:
    """Join the values of each row's key columns to the name of its time series; null without key columns."""
    if not keys:
        return pl.Series("series", [None] * table.height, dtype=pl.String)
    parts = [pl.col(key).cast(pl.String).fill_null("") for key in keys]
    return table.select(series=pl.concat_str(parts, separator=" "))["series"]


# Parsing of tables of metrics (CSV, JSON lines, Parquet), and of their times as nanoseconds.

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
            table = read_foreign(data)
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
