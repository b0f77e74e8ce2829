"""Find waits: of streams for each other, of blocking launch calls, and of host calls for GPU activities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core import categories, steps
from etloom.core.arrays import select_values, to_array
from etloom.core.trace import Trace
from etloom.graphs.async_ranges import OPTIMIZER_PATTERN
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays
from etloom.graphs.gpu_activities import GpuActivities, mask_communication
from etloom.graphs.graph import EdgeKind, Int32Array, Int64Array, PointRole
from etloom.graphs.host_threads import HostThreads
from etloom.graphs.minimum_latencies import MinimumLatencies, low_quantile

LATE_NS = 20_000
"""An activity that starts this long after its launch and its predecessor waited for something else."""

SOON_NS = 20_000
"""An activity that waited for another stream starts at most this long after that stream is done."""

_STREAM_WAIT_NAME = r"StreamWaitEvent"
_MAX_CANDIDATES = 8
"""Number of preceding ends of other activities that are examined for a late start."""


@dataclass(eq=False)
class StreamWaits:
    """Pairs of GPU activities (indices): each ``waiter`` waited for the ``source`` on another stream.

    ``inferred``: number of pairs that come from names and times, not from the linked trace.
    """

    waiter: Int64Array
    source: Int64Array
    inferred: int

    def add_edges(
        self, draft: GraphDraft, events: EventArrays, activities: GpuActivities, latencies: MinimumLatencies
    ) -> None:
        """Add an edge from the end of each source to the start of its waiter to the draft of the graph."""
        draft.add_edges(
            EdgeKind.STREAM_WAIT,
            activities.finish[self.source],
            activities.begin[self.waiter],
            latencies.stream,
            events.id[activities.row[self.waiter]],
        )


def find_stream_waits(
    trace: Trace, events: EventArrays, activities: GpuActivities, submission: Int64Array
) -> StreamWaits:
    """Return the waits between streams: those in the linked trace, and those inferred from names and times.

    An activity waited if it starts late, right after an activity of another stream ended, and between the launches of
    both the host made a stream wait for an event.

    Args:
        submission: per call (`GpuActivities.calls`), the earliest time at which it may have submitted its work, ns.
    """
    table = trace.sync_dependencies
    waiter, source = (
        select_values(activities.place, rows).astype(np.int64)
        for rows in (events.rows(table["event"]), events.rows(table["on"]))
    )
    matched = (waiter >= 0) & (source >= 0)
    waiter, source = waiter[matched], source[matched]
    late = np.flatnonzero(_mask_late_starts(activities, submission, waiter))
    inferred = _find_ended_before(events, activities, submission, late)
    is_inferred = inferred >= 0
    waiter, source = np.append(waiter, late[is_inferred]), np.append(source, inferred[is_inferred])
    consumer, communication = _find_consumers(trace, events, activities, source)
    return StreamWaits(
        np.append(waiter, consumer),
        np.append(source, communication),
        int(is_inferred.sum()) + len(consumer),
    )


def _mask_recorded_waits(trace: Trace, events: EventArrays) -> np.ndarray:
    """Return a mask of the calls of which the tracer recorded (cuda_sync) which stream waits, and for which."""
    table = trace.syncs
    stated = table.filter(table["wait_stream"].is_not_null() & table["record_correlation"].is_not_null())
    rows = events.rows(stated["event"])
    numbers = to_array(events.table["correlation"], 0)
    recorded = numbers[rows[rows >= 0]]
    return np.isin(numbers, recorded[recorded > 0])


def _find_consumers(
    trace: Trace, events: EventArrays, activities: GpuActivities, awaited: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return pairs: a GPU activity, and a communication without a known waiter whose result the activity needs.

    If communication ends before its result is needed, the wait leaves no trace, yet a slower network would show it.
    What needs it is the first work of another stream, not before its end, that the host launches after a wait for an
    event (not one whose streams are recorded, nor that with which a communication waits for its input); or else in the
    optimizer, after a reduction; or else in the next step. One edge per consumer and stream: a stream is first in,
    first out. Communication among other kernels of a stream is followed by what needs it.
    """
    is_communication = mask_communication(events, activities)
    copies = categories.MEMCPY_CATEGORIES | categories.MEMSET_CATEGORIES
    is_work = ~is_communication & ~events.cats.match_values(copies)[activities.row]
    mixed = np.unique(activities.stream[is_work])
    unknown = np.flatnonzero(is_communication & ~np.isin(activities.stream, mixed) & (activities.launch >= 0))
    unknown = unknown[~np.isin(unknown, awaited)]
    if not len(unknown):
        return unknown, unknown
    is_recorded = _mask_recorded_waits(trace, events)
    work = np.flatnonzero(is_work & (activities.launch >= 0))
    work = work[np.argsort(events.start[activities.launch[work]], kind="stable")]
    launched = events.start[activities.launch[work]]
    consumer = np.full(len(unknown), -1, np.int64)
    is_reduction = events.names.match_pattern(r"(?i)reduce")[activities.row[unknown]]
    calls = events.start[activities.launch]
    by_call = np.flatnonzero(activities.launch >= 0)
    by_call = by_call[np.argsort(calls[by_call], kind="stable")]
    for pattern, selected in (
        (_STREAM_WAIT_NAME, np.True_),
        (OPTIMIZER_PATTERN, is_reduction),
        (steps.STEP_PATTERN, np.True_),
    ):
        is_gate = events.host & events.names.match_pattern(pattern)
        gates = np.sort(events.start[is_gate & ~is_recorded])
        if pattern == _STREAM_WAIT_NAME:
            following = np.append(by_call, -1)[np.searchsorted(calls[by_call], gates)]
            gates = gates[(following >= 0) & ~is_communication[following]]
        gate = np.searchsorted(gates, events.start[activities.launch[unknown]], side="right")
        first = np.searchsorted(launched, np.append(gates, np.iinfo(np.int64).max)[gate])
        target = np.append(work, -1)[first]
        is_later = (target >= 0) & (activities.start[target] >= activities.end[unknown])
        chosen = selected & is_later & (consumer < 0)
        consumer[chosen] = target[chosen]
    consumed = np.flatnonzero(consumer >= 0)[::-1]
    _, last = np.unique(
        np.stack([activities.stream[unknown[consumed]], consumer[consumed]]), axis=1, return_index=True
    )
    chosen = consumed[last]
    return consumer[chosen], unknown[chosen]


def _mask_late_starts(activities: GpuActivities, submission: Int64Array, explained: Int64Array) -> np.ndarray:
    """Return a mask of the GPU activities that start later than their launch and predecessor on the stream explain.

    Without those that are ``explained`` otherwise.
    """
    submitted = activities.by_call(submission, 0)
    late: np.ndarray = (activities.launch >= 0) & (
        activities.start - np.maximum(submitted, activities.previous_end) > LATE_NS
    )
    late[explained] = False
    return late


def _find_ended_before(
    events: EventArrays, activities: GpuActivities, submission: Int64Array, late: Int64Array
) -> Int64Array:
    """Return for each late GPU activity the index of another stream's activity that it may have waited for, or -1."""
    stream_wait_starts = events.start[
        events.names.match_pattern(_STREAM_WAIT_NAME)
        & events.cats.match_values(categories.RUNTIME_CATEGORIES)
    ]
    submitted = activities.by_call(submission, activities.start.min(initial=0))
    by_end = np.argsort(activities.end, kind="stable")
    last = np.searchsorted(activities.end[by_end], activities.start[late], side="right") - 1
    source = np.full(len(late), -1, np.int64)
    for back in range(_MAX_CANDIDATES):
        near = by_end[np.maximum(last - back, 0)] if len(by_end) else last
        is_consistent = (source < 0) & (last >= back) & (activities.stream[near] != activities.stream[late])
        is_consistent &= activities.start[late] - activities.end[near] <= SOON_NS
        is_consistent &= np.searchsorted(stream_wait_starts, submitted[late]) > np.searchsorted(
            stream_wait_starts, submitted[near]
        )
        source[is_consistent] = near[is_consistent]
    return source


def find_blocking_calls(trace: Trace, events: EventArrays, activities: GpuActivities) -> Int64Array:
    """Return the indices (in `GpuActivities.calls`) of launch calls that submitted work and also waited for the GPU."""
    waiting: Int64Array = np.flatnonzero(
        np.isin(activities.calls, events.rows(trace.sync_dependencies["event"]))
    )
    return waiting


def advance_blocking_calls(
    events: EventArrays,
    activities: GpuActivities,
    submission: Int64Array,
    blocking: Int64Array,
    waits: StreamWaits,
) -> Int64Array:
    """Return submission times of launch calls, ns; a blocking call submitted earlier by the wait of its GPU work.

    The GPU work waited for the previous activity of its stream or for another stream.
    """
    ready = activities.previous_end.copy()
    np.maximum.at(ready, waits.waiter, activities.end[waits.source])
    first = np.zeros(len(activities.calls), np.int64)
    launched = np.flatnonzero(activities.call >= 0)[::-1]
    launched = launched[
        activities.start[launched] == activities.first_start_by_call[activities.call[launched]]
    ]
    first[activities.call[launched]] = launched
    called = events.start[activities.calls[blocking]]
    advanced = submission.copy()
    advanced[blocking] -= np.clip(ready[first[blocking]] - called, 0, submission[blocking] - called)
    return advanced


# Add graph edges from GPU activities to the host calls that waited for them.

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
            & events.cats.match_values(categories.RUNTIME_CATEGORIES)
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
