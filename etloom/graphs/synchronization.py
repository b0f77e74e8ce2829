"""Waits for GPU activities: blocking calls until they end, streams before they continue."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.trace import Trace
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.graph import EdgeKind, Int64Array
from etloom.graphs.host_threads import HostThreads
from etloom.graphs.minimum_latencies import MinimumLatencies, low_quantile

SKEW_NS = 50_000
"""An activity may end this long after the call that waited for it returned: the clocks differ."""

LATE_NS = 20_000
"""An activity that starts this long after its launch and its predecessor waited for something else."""

SOON_NS = 20_000
"""An activity that waited for another stream starts at most this long after that stream is done."""

QUEUE_CAPACITY = 1000
"""Queue length from which a launch call waits for room; CUDA's queue holds 1,024."""

MIN_BLOCKED_NS = 20_000
"""A launch call that takes less did not wait for room."""

MAX_QUEUE_DELAY_NS = 100_000
"""A call that waited for room returns at most this long after an activity has ended."""

_STREAM_WAIT_NAME = r"StreamWaitEvent"
_MAX_CANDIDATES = 8
"""Number of preceding ends of other activities that are examined for a late start."""


class SynchronizationEdges:
    """The `waits` of a linked trace that fit its points; places index `HostThreads` and `GpuActivities`.

    Host waits: ``end`` (place of the point at which the call returns), ``on`` (place of the activity), ``skewed``: the
    activity seems to end after the return. Stream waits: ``waiter`` and ``source`` (places of activities). ``lost``:
    number of waits without points, or inconsistent even with clock skew.
    """

    def __init__(
        self, trace: Trace, events: EventArrays, threads: HostThreads, activities: GpuActivities
    ) -> None:
        table = trace.sync_dependencies
        event, on = events.rows(table["event"]), events.rows(table["on"])
        source = np.where(on >= 0, activities.place[on], -1) if on.size else on
        end = np.where(event >= 0, threads.end[event], -1) if event.size else event
        waiter = np.where(event >= 0, activities.place[event], -1) if event.size else event
        self.inferred = int((table["how"] == "inferred").sum())
        host = np.flatnonzero((source >= 0) & (end >= 0))
        device = np.flatnonzero((source >= 0) & (waiter >= 0))
        returned = threads.time[end[host]] if host.size else np.zeros(0, np.int64)
        ended = activities.end[source[host]] if host.size else returned
        # The call did not wait for an activity that starts after its return.
        is_consistent = (ended <= returned + SKEW_NS) & (activities.start[source[host]] <= returned)
        host = host[is_consistent]
        self.end, self.on = end[host], source[host]
        self.returned, self.ended = returned[is_consistent], ended[is_consistent]
        self.skewed = self.ended > self.returned
        self.waiter, self.source = waiter[device], source[device]
        self.lost = len(table) - host.size - device.size

    def infer_stream_waits(
        self, events: EventArrays, activities: GpuActivities, submission: Int64Array
    ) -> None:
        """Infer stream waits that were not recorded.

        An activity starts late, right after an activity of another stream ended, and between the launches of both the
        host made a stream wait for an event.
        """
        stream_wait_starts = events.start[
            events.names.match_regex(_STREAM_WAIT_NAME) & events.cats.is_in(categories.RUNTIME_CATEGORIES)
        ]
        launched = activities.launch >= 0
        submitted = activities.by_call(submission, activities.start.min(initial=0))
        waited = launched & (activities.start - np.maximum(submitted, activities.previous_end) > LATE_NS)
        waited[self.waiter] = False
        late = np.flatnonzero(waited)
        by_end = np.argsort(activities.end, kind="stable")
        last = np.searchsorted(activities.end[by_end], activities.start[late], side="right") - 1
        source = np.full(len(late), -1, np.int64)
        for back in range(_MAX_CANDIDATES):
            near = by_end[np.maximum(last - back, 0)] if len(by_end) else last
            is_consistent = (
                (source < 0) & (last >= back) & (activities.stream[near] != activities.stream[late])
            )
            is_consistent &= activities.start[late] - activities.end[near] <= SOON_NS
            is_consistent &= np.searchsorted(stream_wait_starts, submitted[late]) > np.searchsorted(
                stream_wait_starts, submitted[near]
            )
            source[is_consistent] = near[is_consistent]
        is_inferred = source >= 0
        self.waiter = np.append(self.waiter, late[is_inferred])
        self.source = np.append(self.source, source[is_inferred])
        self.inferred += int(is_inferred.sum())

    def infer_queue_waits(self, events: EventArrays, threads: HostThreads, activities: GpuActivities) -> None:
        """Infer the launch calls that waited for room in a full queue, until the last activity to end before them."""
        launched = activities.launch[activities.launch >= 0]
        # A queue belongs to a process and its device; with several in a rank, the length of each is unknown.
        if len(activities.row) + len(launched) < QUEUE_CAPACITY or len(np.unique(events.pid[launched])) != 1:
            return
        is_launch = (
            events.names.same_as(launched)
            & events.cats.is_in(categories.RUNTIME_CATEGORIES)
            & (threads.end >= 0)
        )
        calls = np.flatnonzero(is_launch)
        calls = calls[np.argsort(events.start[calls], kind="stable")]
        by_end = np.argsort(activities.end, kind="stable")
        ended = np.searchsorted(activities.end[by_end], events.end[calls], side="right")
        unlaunched = int((activities.launch < 0).sum())
        last = by_end[np.maximum(ended - 1, 0)]
        full = unlaunched + np.arange(len(calls)) - ended >= QUEUE_CAPACITY
        full &= (events.end[calls] - events.start[calls] > MIN_BLOCKED_NS) & (ended > 0)
        full &= (events.end[calls] - activities.end[last] <= MAX_QUEUE_DELAY_NS) & (
            activities.end[last] > events.start[calls]
        )
        place = threads.end[calls[full]]
        full[full] = ~np.isin(place, self.end)
        self.end = np.append(self.end, threads.end[calls[full]])
        self.on = np.append(self.on, last[full])
        self.returned = threads.time[self.end]
        self.ended = activities.end[self.on]
        self.skewed = self.ended > self.returned
        self.inferred += int(full.sum())

    def measure_entries(self, events: EventArrays, threads: HostThreads) -> dict[str, int]:
        """Return the minimum duration of calls whose activity was already done, by name of the call, ns."""
        if not self.end.size:
            return {}
        entered = threads.time[self.end - 1]
        late = np.zeros(len(threads.time), bool)
        late[self.end[self.ended > entered]] = True
        places = np.unique(self.end)
        names = events.table["name"][threads.row[places]].cast(pl.String)
        shortest: dict[str, int] = {}
        for place, name in zip(places, names, strict=True):
            if not late[place]:
                duration = int(threads.time[place] - threads.time[place - 1])
                shortest[name] = min(duration, shortest.get(name, duration))
        return shortest

    def measure_sync(self, threads: HostThreads) -> int:
        """Return the low quantile of the time from the end of an activity to the return of the call that waited, ns."""
        waited = (self.ended > threads.time[self.end - 1]) & ~self.skewed
        return low_quantile((self.returned - self.ended)[waited])

    def add_edges(
        self,
        draft: GraphDraft,
        events: EventArrays,
        threads: HostThreads,
        activities: GpuActivities,
        min_latencies: MinimumLatencies,
    ) -> None:
        """Turn the last segment of each blocking call into a wait, and add the edges that end it."""
        ids = events.id
        place = np.unique(self.end)
        names = events.table["name"][threads.row[place]].cast(pl.String)
        threads.mark_waits(place, np.array([min_latencies.get_entry(name) for name in names], np.int64))
        draft.add_edges(
            EdgeKind.SYNC,
            np.where(self.skewed, activities.begin[self.on], activities.finish[self.on]),
            threads.base + self.end,
            np.where(self.skewed, self.returned - activities.start[self.on], min_latencies.sync),
            ids[threads.row[self.end]],
        )
        draft.add_edges(
            EdgeKind.STREAM_WAIT,
            activities.finish[self.source],
            activities.begin[self.waiter],
            min_latencies.stream,
            ids[activities.row[self.waiter]],
        )
