"""GPU activity in order of launch: the last one launched on a stream before a time, and the first one after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etloom._native import number_pairs
from etloom.core.arrays import (
    find_in_group,
    find_values,
    is_present,
    rows_of_ids,
    select_values,
    sort_rows,
    take_rows,
    to_array,
)
from etloom.core.trace import Trace

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class LaunchedWork:
    """GPU activities in order of launch, start and end.

    Attributes:
        rows: Row of each activity in the table ``events``.
        calls: Row of its launch call, -1 if the table does not have it.
        devices: Its device, 0 if none is recorded.
        streams: Its stream; if none is recorded its thread, else 0.
        starts: Its start, ns.
        ends: Its end, ns.
        launched: The start of its launch call, ns. An activity without one, which was mostly launched before the
            recording, counts as launched when it starts.
        has_launch: Mask of the activities whose launch is recorded.
    """

    rows: Numbers
    calls: Numbers
    devices: Numbers
    streams: Numbers
    starts: Numbers
    ends: Numbers
    launched: Numbers
    has_launch: NDArray[np.bool_]

    def list_streams(self) -> tuple[Numbers, Numbers]:
        """Return the device and the stream of each stream that has an activity."""
        _, firsts, _ = find_values(number_pairs(self.devices, self.streams))
        return self.devices[firsts], self.streams[firsts]

    def find_last_before(self, devices: Numbers, streams: Numbers, times: Numbers, until: Numbers) -> Numbers:
        """Return the index of the last activity launched on each stream before a time, -1 for none.

        Args:
            devices: The device of each stream.
            streams: The streams.
            times: The time for each stream, ns.
            until: The end of the wait, ns: an activity without a recorded launch counts if it ends before.
        """
        numbers, groups = self._number_streams(devices, streams)
        launched, hidden = np.flatnonzero(self.has_launch), np.flatnonzero(~self.has_launch)
        last = select_values(
            launched, find_in_group(groups[launched], self.launched[launched], numbers, times)
        )
        if hidden.size:
            hidden = hidden[np.argsort(self.ends[hidden], kind="stable")]
            other = select_values(hidden, find_in_group(groups[hidden], self.ends[hidden], numbers, until))
            is_later = (other >= 0) & ((last < 0) | (self.starts[other] > self.starts[last]))
            last = np.where(is_later, other, last)
        return last

    def find_first_after(self, devices: Numbers, streams: Numbers, times: Numbers) -> Numbers:
        """Return the index of the first activity launched on each stream at or after a time (ns), -1 for none."""
        numbers, groups = self._number_streams(devices, streams)
        return find_in_group(groups, self.launched, numbers, times, after=True)

    def _number_streams(
        self, devices: Numbers, streams: Numbers
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return a number for each of the given streams, and for the stream of each activity."""
        numbers = number_pairs(np.append(devices, self.devices), np.append(streams, self.streams))
        return numbers[: len(devices)], numbers[len(devices) :]


def order_by_launch(trace: Trace) -> LaunchedWork:
    """Return the GPU activities in the table `launches`, in order of launch."""
    events, launches = trace.events, trace.launches
    rows = rows_of_ids(events, launches["device_event"])
    listed = np.flatnonzero(rows >= 0)
    rows, calls = rows[listed], rows_of_ids(events, launches["launch"])[listed]
    times, durations = to_array(events["ts"], 0), to_array(events["dur"], 0)
    starts, ends = times[rows], times[rows] + durations[rows]
    launched = np.where(calls >= 0, times[calls], starts) if rows.size else starts
    order = sort_rows(launched, starts, ends)
    rows = rows[order]
    stream = take_rows(events["stream"], rows)
    return LaunchedWork(
        rows,
        calls[order],
        to_array(events["device"], 0)[rows].astype(np.int64),
        np.where(is_present(stream), to_array(stream, 0), to_array(events["tid"], 0)[rows]).astype(np.int64),
        starts[order],
        ends[order],
        launched[order],
        is_present(launches["launch"])[listed][order],
    )
