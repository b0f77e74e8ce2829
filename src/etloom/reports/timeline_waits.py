"""The waits of ranks in collectives, for the events of the timeline: for which rank each one waits, and how long."""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers.run_tables import ARRIVAL_ORDER
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.trace import Job
from etloom.reports.packed_columns import Column, encode_column

_SCHEMA = {"event": pl.Int64, "late": pl.Int64, "late_event": pl.Int64, "wait": pl.Int64}
NO_WAITS = pl.DataFrame(schema=_SCHEMA)


def find_waits(job: Job) -> dict[int, pl.DataFrame]:
    """Return rank -> event, late (the rank that arrives last), late_event (its event) and wait (ns) of collectives.

    For the last rank itself, ``wait`` is the longest wait for it.
    """
    arrivals = ARRIVAL_ORDER.read(job)
    is_last = pl.col("order") == pl.col("size") - 1
    last = arrivals.filter(is_last).select("instance", late="rank", late_event="event")
    waits = arrivals.with_columns(
        wait=pl.when(is_last).then(pl.col("wait").max().over("instance")).otherwise("wait")
    ).join(last, on="instance")
    return {rank: rows.select(list(_SCHEMA)) for (rank,), rows in waits.group_by("rank")}  # type: ignore[misc]


def encode_waits(waits: pl.DataFrame, plotted: pl.DataFrame) -> list[Column]:
    """Return the columns ``late`` and ``late_event`` (1 + their value; 0: unknown) and ``wait`` of plotted events."""
    rows = rows_of_ids(waits.rename({"event": "id"}), plotted["id"].cast(pl.Int64))
    late, late_event, wait = (take_rows(waits[name], rows) for name in ("late", "late_event", "wait"))
    return [
        encode_column("late", "u32", late + 1, by_difference=True),
        encode_column("late_event", "u32", late_event + 1, by_difference=True),
        encode_column("wait", "wide", wait),
    ]
