"""How much launched work waits on each stream, as a series of changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.activity import launched_numbers, streams
from etloom.analyses._activity import of_rank
from etloom.analyses._launched import launched
from etloom.analyses._running import Running
from etloom.errors import AnalysisError
from etloom.trace import Trace

Ints = NDArray[np.int64]
_ABSENT = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Changes:
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


def changes(trace: Trace) -> Changes:
    """How the queue of each stream changes.

    Work joins the queue when its launch call begins and leaves it when it starts to run. At one time work joins
    before it leaves. Raises AnalysisError where no launch is known.
    """
    work = launched(trace, "device", "stream")
    launch = launched_numbers(trace, "launch_ts", _ABSENT)
    known = np.flatnonzero(launch != _ABSENT)
    if not known.size:
        raise AnalysisError(
            "the trace holds no launch of its device work",
            where=of_rank(trace),
            remedy="record the host's activity (CPU) together with the device's",
        )
    # Clocks of host and device may differ a little: work that seems to run before its launch never waited.
    starts = launched(trace, "ts")["ts"].to_numpy()[known]
    joins = np.minimum(launch[known], starts)
    lanes = streams(trace)[known]
    waiting = Running(lanes, joins, starts)
    head = np.flatnonzero(np.diff(lanes[waiting.of], prepend=-1))
    return Changes(head, waiting.time, waiting.total(np.ones(known.size, np.int64)), work, known[waiting.of])
