"""The waits of ranks in collectives, for the events of the timeline: for which rank each one waits, and how long."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers.run_tables import ARRIVAL_ORDER
from etloom.core.arrays import take_rows
from etloom.core.trace import Job
from etloom.reports.packed_columns import Column, encode_column

_SCHEMA = {"event": pl.Int64, "late": pl.Int64, "late_event": pl.Int64, "wait": pl.Int64}
NO_WAITS = pl.DataFrame(schema=_SCHEMA)


def find_waits(job: Job) -> dict[int, pl.DataFrame]:
    """Return rank -> event (ascending), late (the last rank), late_event (its event) and wait (ns) of its collectives.

    For the last rank itself, ``wait`` is the longest wait for it.
    """
    arrivals = ARRIVAL_ORDER.read(job)
    is_last = pl.col("order") == pl.col("size") - 1
    last = arrivals.filter(is_last).select("instance", late="rank", late_event="event")
    waits = arrivals.with_columns(
        wait=pl.when(is_last).then(pl.col("wait").max().over("instance")).otherwise("wait")
    ).join(last, on="instance")
    by_rank = waits.sort("event").group_by("rank", maintain_order=True)
    return {rank: rows.select(list(_SCHEMA)) for (rank,), rows in by_rank}  # type: ignore[misc]


def encode_waits(waits: pl.DataFrame, plotted: pl.DataFrame) -> list[Column]:
    """Return the columns ``late`` and ``late_event`` (1 + their value; 0: unknown) and ``wait`` of plotted events."""
    events, ids = waits["event"].to_numpy(), plotted["id"].to_numpy()
    rows = np.full(ids.size, -1)
    if events.size:
        at = np.minimum(np.searchsorted(events, ids), events.size - 1)
        rows = np.where(events[at] == ids, at, -1)
    late, late_event, wait = (take_rows(waits[name], rows) for name in ("late", "late_event", "wait"))
    return [
        encode_column("late", "u32", late + 1, by_difference=True),
        encode_column("late_event", "u32", late_event + 1, by_difference=True),
        encode_column("wait", "wide", wait),
    ]
