"""From what a reader found to a Trace: types narrowed with the losses counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from etloom.schema import TABLES
from etloom.trace import Trace

Stat = tuple[str, str, int, "str | None"]
"""name, severity, count, example: a row of the stats table."""


def trace_of(tables: Mapping[str, pl.DataFrame], meta: Mapping[str, Any], stats: list[Stat]) -> Trace:
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
                lost.append(("read.out_of_range", "data_loss", count, example))
        fitted[name] = narrow
    return Trace(fitted, meta).with_stats([*stats, *lost])


def timeline(events: pl.DataFrame) -> pl.DataFrame:
    """events (ts, dur, ``position``) in the order of the events table: ts, longest first, position."""
    return events.sort(
        "ts", "dur", "position", descending=[False, True, False], nulls_last=[False, True, False]
    )
