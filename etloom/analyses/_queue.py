"""How much launched work waits on each stream, as a series of changes."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses._activity import of_rank
from etloom.analyses._launched import launched
from etloom.analyses._running import Running
from etloom.errors import AnalysisError
from etloom.stacks import lane_codes
from etloom.trace import Trace

LANE = ["device", "stream"]


def series(trace: Trace) -> pl.DataFrame:
    """device, stream, ts, queue_length after every change, by stream and time; one row for each time.

    Work joins the queue when its launch call begins and leaves it when it starts to run. At one time work joins
    before it leaves. Raises AnalysisError where no launch is known.
    """
    work = launched(trace, *LANE, "ts", "launch_ts").drop_nulls("launch_ts")
    if not work.height:
        raise AnalysisError(
            "the trace holds no launch of its device work",
            where=of_rank(trace),
            remedy="record the host's activity (CPU) together with the device's",
        )
    # Clocks of host and device may differ a little: work that seems to run before its launch never waited.
    starts = work["ts"].to_numpy()
    joins = np.minimum(work["launch_ts"].to_numpy(), starts)
    waiting = Running(lane_codes(work, LANE), joins, starts)
    length = waiting.total(np.ones(work.height, dtype=np.int64))
    lanes: pl.DataFrame = work.select(LANE)[waiting.of]
    return lanes.with_columns(ts=pl.Series(waiting.time), queue_length=pl.Series(length))
