"""How much launched work waits on each stream, as a series of changes."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.activity import launched_numbers, streams
from etloom.analyses._activity import of_rank
from etloom.analyses._launched import launched
from etloom.analyses._running import Running
from etloom.errors import AnalysisError
from etloom.trace import Trace

LANE = ["device", "stream"]
_ABSENT = np.iinfo(np.int64).min


def series(trace: Trace) -> pl.DataFrame:
    """device, stream, ts, queue_length after every change, by stream and time; one row for each time.

    Work joins the queue when its launch call begins and leaves it when it starts to run. At one time work joins
    before it leaves. Raises AnalysisError where no launch is known.
    """
    work = launched(trace, *LANE, "ts")
    launch = launched_numbers(trace, "launch_ts", _ABSENT)
    known = np.flatnonzero(launch != _ABSENT)
    if not known.size:
        raise AnalysisError(
            "the trace holds no launch of its device work",
            where=of_rank(trace),
            remedy="record the host's activity (CPU) together with the device's",
        )
    # Clocks of host and device may differ a little: work that seems to run before its launch never waited.
    starts = work["ts"].to_numpy()[known]
    joins = np.minimum(launch[known], starts)
    waiting = Running(streams(trace)[known], joins, starts)
    length = waiting.total(np.ones(known.size, dtype=np.int64))
    lanes = {name: work[name][known[waiting.of]] for name in LANE}
    return pl.DataFrame({**lanes, "ts": waiting.time, "queue_length": length})
