"""Launch queue length of each stream, as a series of changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.analyses.helpers.running_totals import RunningTotals
from etloom.core.errors import AnalysisError
from etloom.core.nesting import track_codes
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

Ints = NDArray[np.int64]
_TRACK = ("device", "stream")


@dataclass(frozen=True)
class QueueChanges:
    """Changes of the launch queue length of each stream, sorted by stream and time; at most a single change per
    time."""

    head: Ints  # index of the first change of each stream
    time: Ints  # ns
    length: Ints  # queue length from then on
    _work: pl.DataFrame  # device, stream
    _row: Ints  # a row of _work on the stream of each change

    def track_columns(self, rows: Ints | slice) -> dict[str, pl.Series]:
        """Return the columns device and stream for the queue length changes at ``rows``."""
        activity_rows = self._row[rows]
        return {column.name: column[activity_rows] for column in self._work}


def compute_queue_changes(trace: Trace) -> QueueChanges:
    """Return the changes over time of the number of launched, not yet started activities of each stream.

    An activity enters the queue when its launch call begins and leaves it when it starts. Simultaneous changes are
    combined.

    Raises:
        AnalysisError: No launch was recorded.
    """
    work = select_launched_work(trace, "device", "stream", "ts", "launch_ts").drop_nulls("launch_ts")
    if work.is_empty():
        raise AnalysisError(
            "the trace contains no launches of its GPU activity",
            where=describe_rank(trace),
            remedy="record CPU and CUDA activity together",
        )
    # Host and device clocks may differ slightly: an activity that seems to start before its launch never queued.
    starts = work["ts"].to_numpy()
    joins = np.minimum(work["launch_ts"].to_numpy(), starts)
    tracks = track_codes(work, _TRACK)
    waiting = RunningTotals(tracks, joins, starts)
    head = np.flatnonzero(np.diff(tracks[waiting.item], prepend=-1))
    return QueueChanges(
        head,
        waiting.time,
        waiting.sum_weights(np.ones(work.height, np.int64)),
        work.select(_TRACK),
        waiting.item,
    )
