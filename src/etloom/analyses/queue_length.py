"""Launch queue length of each stream over time: activities launched but not started.

One row per change: from this time until the next row of the stream, queue_length activities were queued. An activity
enters the queue when its launch call begins and leaves it when it starts; changes at the same time are combined. A
queue that stays empty means that the device waits for the host. See `queue-summary` for totals.

Units: ns. Definition: HolisticTraceAnalysis get_queue_length_time_series, which counts synchronizations as activities
and lists simultaneous changes in arbitrary order.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import polars as pl

from etloom.analyses.helpers import check_step, conform_columns
from etloom.analyses.helpers.launch_queue import compute_queue_changes
from etloom.core.trace import Trace
from etloom.timeline.activity import find_steps

SCOPE = "rank"
COLUMNS = {"device": pl.Int64, "stream": pl.Int64, "time_ns": pl.Int64, "queue_length": pl.Int64}


def analyze(
    trace: Trace,
    *,
    step: Annotated[int | None, "Only the time from the start to the end of this step."] = None,
) -> pl.DataFrame:
    queues = compute_queue_changes(trace)
    check_step(trace, step)
    rows = np.arange(queues.time.size)
    if step is not None:
        _, start, end = find_steps(trace).row(by_predicate=pl.col("step") == step)
        rows = np.flatnonzero((queues.time >= start) & (queues.time < end))
    table = {"time_ns": queues.time[rows], "queue_length": queues.length[rows], **queues.track_columns(rows)}
    return conform_columns(table, COLUMNS)
