"""Sum the weights of the items (intervals) that run at the same time on a track, at each time when the sum changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from etloom.core.nesting import order_by_track

Ints = NDArray[np.int64]


class RunningTotals:
    """Times at which items (intervals with a track) begin or end, by track and time, without duplicates.

    Attributes:
        time: The times, ns.
        item: For each time, the index of one of the items that begin or end then.

    Args:
        tracks: Track number of each item, from 0 (see `track_codes`).
        starts, ends: ns, start <= end.
    """

    def __init__(self, tracks: Ints, starts: Ints, ends: Ints) -> None:
        time, track = np.concatenate((starts, ends)), np.tile(tracks, 2)
        order = np.argsort(time, kind="stable")
        self._order = order = order[order_by_track(track[order])]
        track, time = track[order], time[order]
        self._last = np.ones(order.size, dtype=np.bool_)
        self._last[:-1] = (track[1:] != track[:-1]) | (time[1:] != time[:-1])
        self.time = time[self._last]
        self.item = order[self._last] % max(tracks.size, 1)

    def sum_weights(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of the weights of the items that run from each time until the next time of the same track."""
        # Everything that begins on a track also ends there, so each track starts at zero.
        change = np.concatenate((weights, -weights))
        sums: NDArray[Any] = np.cumsum(change[self._order])[self._last]
        return sums
