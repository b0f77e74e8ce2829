"""What runs at one time, lane by lane, as a series of changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from etloom.core.arrays import sort_by_track

Ints = NDArray[np.int64]


class RunningTotals:
    """The times at which something begins or ends on a lane, by lane and time; each time of a lane once.

    lanes: a number from 0 for each thing (`stacks.lane_codes`); starts and ends: ns, start <= end. ``of`` is one of
    the things that begin or end at each time, ``time`` the time.
    """

    def __init__(self, lanes: Ints, starts: Ints, ends: Ints) -> None:
        time, lane = np.concatenate((starts, ends)), np.tile(lanes, 2)
        order = np.argsort(time, kind="stable")
        self._order = order = order[sort_by_track(lane[order])]
        lane, time = lane[order], time[order]
        self._last = np.ones(order.size, dtype=np.bool_)
        self._last[:-1] = (lane[1:] != lane[:-1]) | (time[1:] != time[:-1])
        self.time = time[self._last]
        self.of = order[self._last] % max(lanes.size, 1)

    def total(self, weights: NDArray[Any]) -> NDArray[Any]:
        """The sum of the weights of what runs from each time on, until the next of its lane."""
        # All that begins on a lane ends there, so each lane begins at zero.
        change = np.concatenate((weights, -weights))
        sums: NDArray[Any] = np.cumsum(change[self._order])[self._last]
        return sums
