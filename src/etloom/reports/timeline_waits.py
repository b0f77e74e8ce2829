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
    """Return rank -> event (ascending), late, late_event and wait (ns) of the collectives in which a rank waits.

    ``late`` is the rank that it waits for (of a broadcast the root), ``late_event`` the event of that rank. For a rank
    that others wait for, it is the rank itself, and ``wait`` is the longest wait for it.
    """
    arrivals = ARRIVAL_ORDER.read(job)
    late = arrivals.unique(["instance", "start"], keep="first", maintain_order=True).select(
        "instance", awaited="start", late="rank", late_event="event"
    )
    waiting = arrivals.join(late, on=["instance", "awaited"])
    longest = waiting.group_by("instance", rank="late", event="late_event").agg(pl.col("wait").max())
    awaited = longest.join(waiting.select("rank", "event"), on=["rank", "event"], how="anti").with_columns(
        late="rank", late_event="event"
    )
    waits = pl.concat([rows.select("rank", *_SCHEMA) for rows in (waiting, awaited)])
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
