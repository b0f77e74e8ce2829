"""How much launched work waits on each stream, as a series of changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.analyses.helpers.running_totals import RunningTotals
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, encode_streams, select_launched_array

Ints = NDArray[np.int64]
_ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True)
class QueueChanges:
    """By stream and time, each time of a stream once."""

    head: Ints  # where the changes of each stream begin
    time: Ints  # ns
    length: Ints  # how much work waits from then on
    _work: pl.DataFrame  # device, stream
    _row: Ints  # a row of work on the stream of each change

    def lane(self, rows: Ints | slice) -> dict[str, pl.Series]:
        """device and stream of these changes."""
        of = self._row[rows]
        return {column.name: column[of] for column in self._work}


def compute_queue_changes(trace: Trace) -> QueueChanges:
    """How the queue of each stream changes.

    Work joins the queue when its launch call begins and leaves it when it starts to run. At one time work joins
    before it leaves. Raises AnalysisError where no launch is known.
    """
    work = select_launched_work(trace, "device", "stream")
    launch = select_launched_array(trace, "launch_ts", _ABSENT)
    known = np.flatnonzero(launch != _ABSENT)
    if not known.size:
        raise AnalysisError(
            "the trace holds no launch of its device work",
            where=describe_rank(trace),
            remedy="record the host's activity (CPU) together with the device's",
        )
    # Clocks of host and device may differ a little: work that seems to run before its launch never waited.
    starts = select_launched_work(trace, "ts")["ts"].to_numpy()[known]
    joins = np.minimum(launch[known], starts)
    lanes = encode_streams(trace)[known]
    waiting = RunningTotals(lanes, joins, starts)
    head = np.flatnonzero(np.diff(lanes[waiting.of], prepend=-1))
    return QueueChanges(
        head, waiting.time, waiting.total(np.ones(known.size, np.int64)), work, known[waiting.of]
    )
