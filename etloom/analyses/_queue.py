"""How much launched work waits on each stream, as a series of changes."""

from __future__ import annotations

import polars as pl

from etloom.analyses._activity import of_rank
from etloom.analyses._launched import launched
from etloom.errors import AnalysisError
from etloom.trace import Trace

LANE = ["device", "stream"]


def series(trace: Trace) -> pl.DataFrame:
    """device, stream, ts, step, queue_length after every change, by stream and time; one row for each time.

    Work joins the queue when its launch call begins and leaves it when it starts to run. At one time work joins
    before it leaves. Raises AnalysisError where no launch is known.
    """
    work = launched(trace).filter(pl.col("launch_ts").is_not_null())
    if not work.height:
        raise AnalysisError(
            "the trace holds no launch of its device work",
            where=of_rank(trace),
            remedy="record the host's activity (CPU) together with the device's",
        )
    # Clocks of host and device may differ a little: work that seems to run before its launch never waited.
    joins = work.select(
        *LANE, pl.min_horizontal("launch_ts", "ts").alias("ts"), "step", pl.lit(1).alias("change")
    )
    leaves = work.select(*LANE, "ts", "step", pl.lit(-1).alias("change"))
    return (
        pl.concat((joins, leaves))
        .group_by(*LANE, "ts")
        .agg(pl.col("change").sum(), pl.col("step").first())
        .sort(*LANE, "ts", nulls_last=True)
        .with_columns(pl.col("change").cum_sum().over(LANE).cast(pl.Int64).alias("queue_length"))
        .drop("change")
    )
