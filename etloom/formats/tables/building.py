"""From what a reader found to a Trace: types narrowed with the losses counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace


def build_series(name: str, values: Sequence[Any], dtype: Any) -> tuple[pl.Series, int]:
    """A column of text, bytes, numbers or booleans, and how many values were no such thing and became null."""
    try:
        return pl.Series(name, values, dtype=dtype), 0
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        wanted = _PYTHON.get(dtype, (int,))
        clean = [v if isinstance(v, wanted) and _fits(v, dtype) else None for v in values]
        lost = clean.count(None) - list(values).count(None)
        return pl.Series(name, clean, dtype=dtype), lost


_PYTHON: dict[Any, tuple[type, ...]] = {
    pl.String: (str,),
    pl.Binary: (bytes,),
    pl.Boolean: (bool,),
    pl.Float64: (float, int),
}
_RANGE = {pl.Int64: (-(1 << 63), 1 << 63), pl.UInt64: (0, 1 << 64)}


def _fits(value: Any, dtype: Any) -> bool:
    low, high = _RANGE.get(dtype, (0, 0))
    return low == high or low <= value < high


def build_frame(table: str, rows: list[dict[str, Any]], stats: list[Stat]) -> pl.DataFrame:
    """Rows as wide columns; a value of another type than its column becomes null and is counted."""
    wide = {pl.Categorical: pl.String, pl.Boolean: pl.Boolean, pl.Float64: pl.Float64, pl.UInt64: pl.UInt64}
    given = set().union(*rows)
    columns: list[pl.Series] = []
    for name, dtype in TABLES[table].schema.items():
        kind = wide.get(dtype, pl.Int64)
        if name not in given:
            columns.append(pl.Series(name, [None] * len(rows), dtype=kind))
            continue
        column, lost = build_series(name, [row.get(name) for row in rows], kind)
        columns.append(column)
        if lost:
            stats.append(Stat("read.wrong_type", "data_loss", lost, f"{table}.{name}: now null"))
    return pl.DataFrame(columns)


def build_trace(tables: Mapping[str, pl.DataFrame], meta: Mapping[str, Any], stats: list[Stat]) -> Trace:
    """The Trace of these tables. A value that its column cannot hold becomes null and is counted.

    Columns that are absent become null. Empty tables are left out.
    """
    fitted: dict[str, pl.DataFrame] = {}
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
                example = f"{name}.{column} cannot hold them: now null"
                lost.append(Stat("read.out_of_range", "data_loss", count, example))
        fitted[name] = narrow
    return Trace(fitted, meta).with_stats([*stats, *lost])


def sort_events(events: pl.DataFrame) -> pl.DataFrame:
    """events (ts, dur, ``position``) in the order of the events table: ts, longest first, position."""
    return events.sort(
        "ts", "dur", "position", descending=[False, True, False], nulls_last=[False, True, False]
    )
