"""Add GPU activities to the graph: their points, their order on a stream, and edges from their launch calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.categories import KERNEL_TYPES
from etloom.core.names import list_user_files
from etloom.core.trace import Trace
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays, Mask
from etloom.graphs.graph import EdgeKind, Int32Array, Int64Array, PointRole
from etloom.graphs.host_threads import NO_SUBMISSION, HostThreads
from etloom.graphs.minimum_latencies import MinimumLatencies, low_quantile, median_positive

QUEUED_NS = 20_000
"""An activity submitted this long before its start waits for its stream, not for its launch."""


@dataclass(eq=False)
class GpuActivities:
    """The GPU activities of a rank as arrays, sorted by stream and start.

    ``row`` of the event, ``launch`` (row of the call, -1 for none), ``start``, ``end``, ``stream`` (a number for
    each device and stream), ``previous_end``: end of the previous activity on the stream (the smallest integer for
    none). ``min_latency``: from start to end. ``place``: index of an activity by event row. ``calls``: rows of the
    calls that launched any activity, ascending; ``call``: index into these, -1 for none. ``begin``, ``finish``: numbers
    of the points, once they are added.
    """

    row: Int32Array
    launch: Int32Array
    start: Int64Array
    end: Int64Array
    stream: Int64Array
    previous_end: Int64Array
    min_latency: Int64Array
    place: Int32Array
    calls: Int32Array
    call: Int32Array
    begin: Int32Array
    finish: Int32Array

    @cached_property
    def first_start_by_call(self) -> Int64Array:
        """The start of the first GPU activity that each launch call launched, ns."""
        first = np.full(len(self.calls), np.iinfo(np.int64).max)
        launched = np.flatnonzero(self.call >= 0)
        np.minimum.at(first, self.call[launched], self.start[launched])
        return first

    @property
    def is_first(self) -> np.ndarray:
        """Mask of the GPU activities that are the first on their stream."""
        return np.append(True, np.diff(self.stream) != 0)[: len(self.stream)]

    def by_call(self, values: Int64Array, without: int) -> Int64Array:
        """Return for each GPU activity the value in ``values`` of its launch call; ``without`` if it has no call."""
        by_activity: Int64Array = np.append(values, without)[self.call]
        return by_activity

    def add_edges(self, draft: GraphDraft, ids: Int32Array) -> None:
        """Add an edge from the start to the end of each activity to the draft of the graph."""
        draft.add_edges(EdgeKind.KERNEL, self.begin, self.finish, self.min_latency, ids[self.row])


def collect_gpu_activities(trace: Trace, events: EventArrays) -> GpuActivities:
    """Collect the GPU activities of a linked trace; their graph points are added later."""
    rows = events.rows(trace.launches["device_event"])
    timed = np.flatnonzero(rows >= 0)
    timed = timed[events.timed[rows[timed]]]
    rows, call = rows[timed], events.rows(trace.launches["launch"])[timed]
    stream = _number_streams(events.table.select("pid", "device", "stream", "tid")[rows])
    start, end = events.start[rows], events.end[rows]
    order = np.lexsort((rows, end, start, stream))
    rows, call = rows[order], call[order]
    stream, start, end = stream[order], start[order], end[order]
    place = np.full(len(events), -1, np.int32)
    place[rows] = np.arange(len(rows))
    previous_end = np.append(NO_SUBMISSION, end[:-1])[: len(end)]
    previous_end[np.append(True, np.diff(stream) != 0)[: len(end)]] = NO_SUBMISSION
    launches = np.zeros(len(events), bool)
    launches[call[call >= 0]] = True
    calls = np.flatnonzero(launches).astype(np.int32)
    call_index = np.where(call >= 0, np.searchsorted(calls, call), -1).astype(np.int32)
    no_points = np.zeros(0, np.int32)
    return GpuActivities(
        rows,
        call,
        start,
        end,
        stream,
        previous_end,
        end - start,
        place,
        calls,
        call_index,
        no_points,
        no_points,
    )


def mask_communication(events: EventArrays, activities: GpuActivities) -> Mask:
    """Return a mask of the GPU activities that are communication kernels."""
    kinds = events.names.compute_numbers(
        activities.row, categories.number_kernel_type, "kernel", list_user_files()
    )
    copies = events.cats.match_values(categories.MEMCPY_CATEGORIES | categories.MEMSET_CATEGORIES)[
        activities.row
    ]
    mask: Mask = (kinds == KERNEL_TYPES.index("communication")) & ~copies
    return mask


def _number_streams(activities: pl.DataFrame) -> Int64Array:
    """Return the number of each activity's stream (process, device, stream); the thread replaces an unknown stream."""
    columns = activities.select(
        pl.col("pid").fill_null(0), pl.col("device").fill_null(-1), pl.coalesce("stream", "tid").fill_null(0)
    )
    keys = [columns[name].to_numpy() for name in columns.columns]
    order = np.lexsort(keys[::-1])
    number = np.zeros(len(order), np.int64)
    new = [np.diff(key[order]) != 0 for key in keys]
    number[order[1:]] = np.cumsum(np.logical_or.reduce(new))
    return number


def estimate_submissions(
    events: EventArrays, activities: GpuActivities, latencies: MinimumLatencies | None
) -> tuple[Int64Array, int]:
    """Estimate when each launch call submitted its GPU work, and the assumed delay from submission to start, in ns.

    The submission precedes the start of the first activity by the typical delay on an idle stream, limited to the
    duration of the call. The delay is taken from ``latencies`` if these are known. Of calls that wait for the
    GPU it is only the latest possible time, see `stream_waits.advance_blocking_calls`.
    """
    if latencies is not None:
        delay = latencies.submission
    else:
        idle = np.flatnonzero(activities.launch >= 0)
        idle = idle[activities.previous_end[idle] <= events.end[activities.launch[idle]]]
        delay = median_positive(activities.start[idle] - events.end[activities.launch[idle]])
    return np.clip(
        activities.first_start_by_call - delay, events.start[activities.calls], events.end[activities.calls]
    ), delay


def add_gpu_points(draft: GraphDraft, events: EventArrays, activities: GpuActivities, rank: int) -> None:
    """Add the start and end points of the GPU activities to the graph draft, in stream order."""
    times = np.stack([activities.start, activities.end], axis=1).ravel()
    roles = np.tile([PointRole.START, PointRole.END], len(activities.row))
    points = draft.add_points(times, np.repeat(events.id[activities.row], 2), roles, rank)
    activities.begin, activities.finish = points[::2], points[1::2]


def measure_latencies(activities: GpuActivities, submission: Int64Array) -> tuple[int, int]:
    """Return the minimum latencies (ns) from submission to start, and between consecutive activities of a stream."""
    submitted = activities.by_call(submission, NO_SUBMISSION)
    launched = activities.launch >= 0
    free = launched & (activities.previous_end <= submitted)
    early = launched & ~activities.is_first & (activities.previous_end != NO_SUBMISSION)
    early[early] = activities.start[early] - submitted[early] > QUEUED_NS
    return low_quantile((activities.start - submitted)[free]), low_quantile(
        (activities.start - np.where(early, activities.previous_end, 0))[early]
    )


def add_stream_edges(
    draft: GraphDraft,
    events: EventArrays,
    activities: GpuActivities,
    threads: HostThreads,
    min_latencies: MinimumLatencies,
) -> int:
    """Add launch, stream and overlap edges; return the number of activities whose launch call has no graph point."""
    ids = events.id
    later = np.flatnonzero(~activities.is_first)
    separate = later[activities.start[later] >= activities.end[later - 1]]
    draft.add_edges(
        EdgeKind.STREAM,
        activities.finish[separate - 1],
        activities.begin[separate],
        min_latencies.stream,
        ids[activities.row[separate]],
    )
    overlapping = later[activities.start[later] < activities.end[later - 1]]
    draft.add_edges(
        EdgeKind.OVERLAP,
        activities.begin[overlapping - 1],
        activities.begin[overlapping],
        0,
        ids[activities.row[overlapping]],
    )
    outlasting = _find_longer_predecessors(activities, later)
    draft.add_edges(
        EdgeKind.STREAM,
        activities.finish[outlasting[0]],
        activities.begin[outlasting[1]],
        min_latencies.stream,
        ids[activities.row[outlasting[1]]],
    )
    launched = np.flatnonzero(activities.launch >= 0)
    place = find_launch_points(threads, activities)[activities.call[launched]]
    has = place >= 0
    activity = launched[has]
    draft.add_edges(
        EdgeKind.LAUNCH,
        threads.base + place[has],
        activities.begin[activity],
        min_latencies.launch,
        ids[activities.row[activity]],
    )
    return int((~has).sum())


def find_launch_points(threads: HostThreads, activities: GpuActivities) -> Int32Array:
    """Return for each launch call the thread point from which its GPU work starts: submission, else end or start."""
    end, start = threads.end[activities.calls], threads.start[activities.calls]
    returned = end >= 0
    returned[returned] = threads.time[end[returned]] <= activities.first_start_by_call[returned]
    return np.where(threads.submit >= 0, threads.submit, np.where(returned, end, start)).astype(np.int32)


def _find_longer_predecessors(activities: GpuActivities, later: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return pairs (earlier, later) of activities on a stream: ``earlier`` ended last before ``later`` started.

    Only those where another activity started in between.
    """
    if not later.size:
        return later, later
    # The running maximum of ends within each stream and its holder: ends are made to increase from stream to stream.
    rank = np.argsort(np.argsort(activities.end, kind="stable"), kind="stable") + activities.stream * len(
        activities.end
    )
    best = np.maximum.accumulate(rank)
    holder = np.maximum.accumulate(np.where(rank == best, np.arange(len(rank)), 0))[later - 1]
    ends = activities.end[holder]
    other = (holder != later - 1) & (ends <= activities.start[later])
    return holder[other], later[other]
