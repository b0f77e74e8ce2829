"""GPU activity of streams in order of launch: the last before a call, the first after it.

A stream is first in, first out, so waiting for a stream is waiting for the last activity launched on it before.
"""

from __future__ import annotations

import polars as pl

from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.trace import Trace


def order_by_launch(trace: Trace) -> pl.DataFrame:
    """Return GPU activity in order of launch: on, device, stream, ts, end, launched, known (true if its launch is
    recorded).

    Activity whose launch is not recorded, mostly before the trace began, uses its own start as launch.
    """
    events = trace.events
    launches = trace.launches.select("launch", pl.col("device_event").alias("on"))
    row = rows_of_ids(events, launches["on"])
    launches, row = launches.filter(pl.Series(row >= 0)), row[row >= 0]
    work = events.select("device", "stream", "tid", "ts", "dur")[row]
    call = rows_of_ids(events, launches["launch"])
    return (
        launches.hstack(work)
        .select(
            "on",
            pl.col("device").fill_null(0),
            pl.col("stream").fill_null(pl.col("tid")),
            "ts",
            (pl.col("ts") + pl.col("dur").fill_null(0)).alias("end"),
            take_rows(events["ts"], call).alias("launched").fill_null(work["ts"]),
            pl.col("launch").is_not_null().alias("known"),
        )
        .sort("launched", "ts", "end")
    )


def find_last_before(syncs: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Return syncs (at, until, device, stream) with ``on``, the last activity launched on the stream before, if
    there is one.

    Activity without a recorded launch counts if it ended before the call did.
    """
    stream = ["device", "stream"]
    launched_in_trace, hidden = (
        work.filter(has_launch) for has_launch in (pl.col("known"), ~pl.col("known"))
    )
    matches = syncs.sort("at").join_asof(
        launched_in_trace.select(*stream, "launched", "on", pl.col("ts").alias("began")),
        left_on="at",
        right_on="launched",
        by=stream,
        check_sortedness=False,
    )
    if hidden.height:
        matches = matches.sort("until").join_asof(
            hidden.sort("end").select(
                *stream, "end", pl.col("on").alias("other"), pl.col("ts").alias("other_began")
            ),
            left_on="until",
            right_on="end",
            by=stream,
            check_sortedness=False,
        )
        later = pl.col("began").is_null() | (pl.col("other_began") > pl.col("began"))
        matches = matches.with_columns(pl.when(later).then("other").otherwise("on").alias("on"))
    return matches.drop_nulls("on")


def find_first_after(syncs: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Return syncs (at, device, stream) with ``event``, the first activity launched on the stream after, if there is
    one.
    """
    return (
        syncs.sort("at")
        .join_asof(
            work.select("device", "stream", "launched", pl.col("on").alias("event")),
            left_on="at",
            right_on="launched",
            by=["device", "stream"],
            strategy="forward",
            check_sortedness=False,
        )
        .drop_nulls("event")
    )
