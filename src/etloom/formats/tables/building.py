"""Builds a Trace from a reader's rows: casts values to the schema's types, and counts values that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.formats.io.json_text import replace_surrogates
from etloom.formats.io.limits import check_rows


def build_series(name: str, values: Sequence[Any], dtype: Any) -> tuple[pl.Series, int]:
    """Build a polars column from Python values; values of another type or range become null and are counted.

    Returns:
        The column, and the number of values of another type, which became null.
    """
    try:
        return pl.Series(name, values, dtype=dtype), 0
    except UnicodeEncodeError:  # lone surrogates, which are not characters
        return build_series(name, [replace_surrogates(value) for value in values], dtype)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        accepted = _PYTHON_TYPES.get(dtype, (int,))
        clean = [v if isinstance(v, accepted) and _is_in_range(v, dtype) else None for v in values]
        lost = clean.count(None) - list(values).count(None)
        return pl.Series(name, clean, dtype=dtype), lost


_PYTHON_TYPES: dict[Any, tuple[type, ...]] = {
    pl.String: (str,),
    pl.Categorical: (str,),
    pl.Binary: (bytes,),
    pl.Boolean: (bool,),
    pl.Float64: (float, int),
}
_RANGE = {pl.Int64: (-(1 << 63), 1 << 63), pl.UInt64: (0, 1 << 64)}


def _is_in_range(value: Any, dtype: Any) -> bool:
    low, high = _RANGE.get(dtype, (0, 0))
    return low == high or low <= value < high


def build_rows(
    rows: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Build a data frame from rows (dicts); absent values, and values that a column cannot hold, become null.

    Returns:
        The frame, and for each column the number of values that it cannot hold, which became null.
    """
    columns = {
        name: build_series(name, [row.get(name) for row in rows], dtype) for name, dtype in schema.items()
    }
    return pl.DataFrame([series for series, _ in columns.values()]), {
        name: lost for name, (_, lost) in columns.items() if lost
    }


def build_frame(table: str, rows: list[dict[str, Any]], stats: list[Stat]) -> pl.DataFrame:
    """Build a table of the schema from rows (dicts), with 64-bit numbers and plain text; invalid values become null."""
    wide = {pl.Categorical: pl.String, pl.Boolean: pl.Boolean, pl.Float64: pl.Float64, pl.UInt64: pl.UInt64}
    present = set().union(*rows)
    columns: list[pl.Series] = []
    for name, dtype in TABLES[table].schema.items():
        kind = wide.get(dtype, pl.Int64)
        if name not in present:
            columns.append(pl.Series(name, [None] * len(rows), dtype=kind))
            continue
        column, lost = build_series(name, [row.get(name) for row in rows], kind)
        columns.append(column)
        if lost:
            stats.append(
                Stat(
                    "read.wrong_type",
                    "data_loss",
                    lost,
                    f"{table}.{name} has values of a wrong type: now null",
                )
            )
    return pl.DataFrame(columns)


def build_trace(tables: Mapping[str, pl.DataFrame], meta: Mapping[str, Any], stats: list[Stat]) -> Trace:
    """Build a Trace from tables with 64-bit numbers and plain text, which are cast to the schema's types.

    Values outside of the range of their column in the schema become null and are counted. Absent columns become null.
    Empty tables are left out.

    Raises:
        LimitError: A table has more rows than are accepted.
    """
    check_rows(max((frame.height for frame in tables.values()), default=0), _get_path(meta))
    narrowed: dict[str, pl.DataFrame] = {}
    lost: list[Stat] = []
    for name, frame in tables.items():
        if frame.is_empty():
            continue
        schema = TABLES[name].schema
        narrow = frame.with_columns(
            pl.col(column).cast(schema[column], strict=False) for column in frame.columns
        )
        for column in frame.columns:
            count = narrow[column].null_count() - frame[column].null_count()
            if count:
                example = f"out of the range of {name}.{column}: now null"
                lost.append(Stat("read.out_of_range", "data_loss", count, example))
        narrowed[name] = narrow
    return Trace(narrowed, meta).with_stats([*stats, *lost])


def _get_path(meta: Mapping[str, Any]) -> Path | None:
    return next((Path(name) for name in meta.get("files", ())), None)


def select_columns(
    frame: pl.DataFrame, schema: Mapping[str, Any], **columns: pl.Expr | pl.Series | None
) -> pl.DataFrame:
    """Select the columns of a schema: each from its keyword argument, else from the frame, else null."""
    return frame.select(
        (
            expression
            if (expression := columns.get(name)) is not None
            else pl.col(name)
            if name in frame.columns and name not in columns
            else pl.lit(None)
        )
        .cast(dtype)
        .alias(name)
        for name, dtype in schema.items()
    )


def sort_events(events: pl.DataFrame) -> pl.DataFrame:
    """Sort events (columns ts, dur, position) in the order of the events table: ts, longest first, position."""
    return events.sort(
        "ts", "dur", "position", descending=[False, True, False], nulls_last=[False, True, False]
    )
