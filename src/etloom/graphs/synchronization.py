"""Add graph edges from GPU activities to the host calls that waited for them."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.arrays import select_values
from etloom.core.trace import Trace
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.graph import EdgeKind, Int32Array, PointRole
from etloom.graphs.host_threads import HostThreads
from etloom.graphs.minimum_latencies import MinimumLatencies, low_quantile

SKEW_NS = 50_000
"""An activity may end this long after the call that waited for it returned: the clocks differ."""

QUEUE_CAPACITY = 1000
"""Queue length from which a launch call waits for room; CUDA's queue holds 1,024."""

MIN_BLOCKED_NS = 20_000
"""A launch call that takes less did not wait for room."""

MAX_QUEUE_DELAY_NS = 100_000
"""A call that waited for room returns at most this long after an activity has ended."""


class SynchronizationEdges:
    """Host calls that waited for GPU activities, from a linked trace, and their edges in the graph.

    Only waits that are consistent with the points of the graph are used; indices refer to `HostThreads` and
    `GpuActivities`.

    ``end`` (place of the point at which the call returns), ``on`` (place of the activity), ``skewed``: the activity
    seems to end after the return. ``inferred``: number of waits inferred from calls and times. ``lost``:
    number of waits (also of streams) without points, or inconsistent even with clock skew.
    """

    def __init__(
        self, trace: Trace, events: EventArrays, threads: HostThreads, activities: GpuActivities
    ) -> None:
        table = trace.sync_dependencies
        event, on = events.rows(table["event"]), events.rows(table["on"])
        source = select_values(activities.place, on)
        end = select_values(threads.end, event)
        self.inferred = int((table["how"] == "inferred").sum())
        host = np.flatnonzero((source >= 0) & (end >= 0))
        returned = threads.time[end[host]] if host.size else np.zeros(0, np.int64)
        ended = activities.end[source[host]] if host.size else returned
        # The call did not wait for an activity that starts after its return.
        is_consistent = (ended <= returned + SKEW_NS) & (activities.start[source[host]] <= returned)
        host = host[is_consistent]
        self.end, self.on = end[host], source[host]
        self.returned, self.ended = returned[is_consistent], ended[is_consistent]
        self.skewed = self.ended > self.returned
        between_streams = int(((source >= 0) & (select_values(activities.place, event) >= 0)).sum())
        self.lost = len(table) - host.size - between_streams

    def infer_queue_waits(self, events: EventArrays, threads: HostThreads, activities: GpuActivities) -> None:
        """Infer the launch calls that waited for a slot in a full queue, and the GPU activity whose end freed it."""
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
        """Return a dict from call name to the shortest duration (ns) of a blocking call that did not have to wait."""
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
        """Return a low quantile of the time from the end of a GPU activity to the return of the waiting call, ns."""
        waited = (self.ended > threads.time[self.end - 1]) & ~self.skewed
        return low_quantile((self.returned - self.ended)[waited])

    def add_edges(
        self,
        draft: GraphDraft,
        events: EventArrays,
        threads: HostThreads,
        activities: GpuActivities,
        min_latencies: MinimumLatencies,
        rank: int,
    ) -> None:
        """Mark the last segment of each blocking call as a wait, and add an edge to its end from the GPU activity."""
        ids = events.id
        place = np.unique(self.end)
        names = events.table["name"][threads.row[place]].cast(pl.String)
        threads.mark_waits(place, np.array([min_latencies.get_entry(name) for name in names], np.int64))
        sources = activities.finish[self.on]
        sources[self.skewed] = self._add_apparent_ends(draft, events, activities, rank)
        draft.add_edges(
            EdgeKind.SYNC,
            sources,
            threads.base + self.end,
            np.where(self.skewed, 0, min_latencies.sync),
            ids[threads.row[self.end]],
        )

    def _add_apparent_ends(
        self, draft: GraphDraft, events: EventArrays, activities: GpuActivities, rank: int
    ) -> Int32Array:
        """Add end points for activities that, by skewed clocks, end after the call that waited for them returned.

        Each is at the return of the call, and follows the start of the activity by the time between the two, so that a
        shorter activity shortens the wait.
        """
        on = self.on[self.skewed]
        first = activities.begin[on]
        points = draft.add_points(self.returned[self.skewed], -1, PointRole.END, rank)
        lasted = self.returned[self.skewed] - activities.start[on]
        draft.add_edges(EdgeKind.KERNEL, first, points, lasted, events.id[activities.row[on]])
        return points
