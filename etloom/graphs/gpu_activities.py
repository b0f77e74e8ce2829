"""Device work: its points, the order on a stream, and the launch calls that caused it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from etloom.core.trace import Trace
from etloom.graphs.algorithms import EdgeKind, Int32Array, Int64Array, PointRole
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays
from etloom.graphs.host_threads import NO_SUBMISSION, HostThreads
from etloom.graphs.minimum_latencies import MinimumLatencies, low_quantile, median_positive

QUEUED_NS = 20_000
"""Work that was submitted this long before it starts is held up by its stream and not by its launch."""


@dataclass(eq=False)
class GpuActivities:
    """Device work, stream after stream in order of start.

    ``row`` of the event, ``launch`` (row of the call, -1 for none), ``start``, ``end``, ``stream`` (a number for
    each device and stream), ``before``: the end of what the stream did last (the least integer for none).
    ``floor``: of the piece from start to end. ``place``: by row. ``calls``: the rows of the calls that launched any of
    it, ascending; ``call``: which of these, -1 for none.
    ``begin``, ``finish``: numbers of the points, once they are drawn.
    """

    row: Int32Array
    launch: Int32Array
    start: Int64Array
    end: Int64Array
    stream: Int64Array
    before: Int64Array
    floor: Int64Array
    place: Int32Array
    calls: Int32Array
    call: Int32Array
    begin: Int32Array
    finish: Int32Array

    @cached_property
    def first_start_by_call(self) -> Int64Array:
        """The start of the first work that each call launched."""
        first = np.full(len(self.calls), np.iinfo(np.int64).max)
        launched = np.flatnonzero(self.call >= 0)
        np.minimum.at(first, self.call[launched], self.start[launched])
        return first

    @property
    def first(self) -> np.ndarray:
        """Which are the first of their stream."""
        return np.append(True, np.diff(self.stream) != 0)[: len(self.stream)]

    def by_call(self, values: Int64Array, without: int) -> Int64Array:
        """Of each what these values say of its call."""
        said: Int64Array = np.append(values, without)[self.call]
        return said

    def edges(self, draft: GraphDraft, ids: Int32Array) -> None:
        """Add the pieces from start to end to the draft."""
        draft.edges(EdgeKind.KERNEL, self.begin, self.finish, self.floor, ids[self.row])


def collect_gpu_activities(trace: Trace, events: EventArrays) -> GpuActivities:
    """The device work of a linked trace, not yet drawn."""
    rows = events.rows(trace.launches["device_event"])
    known = np.flatnonzero(rows >= 0)
    known = known[events.timed[rows[known]]]
    rows, call = rows[known], events.rows(trace.launches["launch"])[known]
    stream = _number_streams(events.table.select("pid", "device", "stream", "tid")[rows])
    start, end = events.start[rows], events.end[rows]
    order = np.lexsort((rows, end, start, stream))
    rows, call = rows[order], call[order]
    stream, start, end = stream[order], start[order], end[order]
    place = np.full(len(events), -1, np.int32)
    place[rows] = np.arange(len(rows))
    before = np.append(NO_SUBMISSION, end[:-1])[: len(end)]
    before[np.append(True, np.diff(stream) != 0)[: len(end)]] = NO_SUBMISSION
    launches = np.zeros(len(events), bool)
    launches[call[call >= 0]] = True
    calls = np.flatnonzero(launches).astype(np.int32)
    which = np.where(call >= 0, np.searchsorted(calls, call), -1).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    return GpuActivities(
        rows, call, start, end, stream, before, end - start, place, calls, which, nothing, nothing
    )


def _number_streams(work: pl.DataFrame) -> Int64Array:
    """A number for each process, device and stream (where it is not known, thread) of device work."""
    lanes = work.select(
        pl.col("pid").fill_null(0), pl.col("device").fill_null(-1), pl.coalesce("stream", "tid").fill_null(0)
    )
    keys = [lanes[name].to_numpy() for name in lanes.columns]
    order = np.lexsort(keys[::-1])
    number = np.zeros(len(order), np.int64)
    new = [np.diff(key[order]) != 0 for key in keys]
    number[order[1:]] = np.cumsum(np.logical_or.reduce(new))
    return number


def estimate_submissions(
    events: EventArrays, work: GpuActivities, given: MinimumLatencies | None
) -> tuple[Int64Array, int]:
    """The time at which each of `Devices.calls` has handed over its work, and the delay this assumes.

    A call hands over its first work so long before it starts as work typically takes to start on an idle stream,
    but neither before the call nor after it.
    """
    if given is not None:
        delay = given.submission
    else:
        idle = np.flatnonzero(work.launch >= 0)
        idle = idle[work.before[idle] <= events.end[work.launch[idle]]]
        delay = median_positive(work.start[idle] - events.end[work.launch[idle]])
    return np.clip(work.first_start_by_call - delay, events.start[work.calls], events.end[work.calls]), delay


def add_gpu_points(draft: GraphDraft, events: EventArrays, work: GpuActivities, rank: int) -> None:
    """Add the points of the device work to the draft, each start before its end, in the order of the stream."""
    times = np.stack([work.start, work.end], axis=1).ravel()
    roles = np.tile([PointRole.START, PointRole.END], len(work.row))
    points = draft.points(times, np.repeat(events.id[work.row], 2), roles, rank)
    work.begin, work.finish = points[::2], points[1::2]


def measure_latencies(work: GpuActivities, submission: Int64Array) -> tuple[int, int]:
    """The floors of launch and stream that the recording shows."""
    submitted = work.by_call(submission, NO_SUBMISSION)
    launched = work.launch >= 0
    free = launched & (work.before <= submitted)
    early = launched & ~work.first & (work.before != NO_SUBMISSION)
    early[early] = work.start[early] - submitted[early] > QUEUED_NS
    return low_quantile((work.start - submitted)[free]), low_quantile(
        (work.start - np.where(early, work.before, 0))[early]
    )


def add_stream_edges(
    draft: GraphDraft, events: EventArrays, work: GpuActivities, built: HostThreads, floors: MinimumLatencies
) -> int:
    """Add launch, stream and overlap edges; returns how many launches have no point to leave from."""
    ids = events.id
    later = np.flatnonzero(~work.first)
    apart = later[work.start[later] >= work.end[later - 1]]
    draft.edges(
        EdgeKind.STREAM, work.finish[apart - 1], work.begin[apart], floors.stream, ids[work.row[apart]]
    )
    together = later[work.start[later] < work.end[later - 1]]
    draft.edges(EdgeKind.OVERLAP, work.begin[together - 1], work.begin[together], 0, ids[work.row[together]])
    longer = _find_longer_predecessors(work, later)
    draft.edges(
        EdgeKind.STREAM,
        work.finish[longer[0]],
        work.begin[longer[1]],
        floors.stream,
        ids[work.row[longer[1]]],
    )
    launched = np.flatnonzero(work.launch >= 0)
    at = find_launch_points(built, work)[work.call[launched]]
    has = at >= 0
    some = launched[has]
    draft.edges(EdgeKind.LAUNCH, built.base + at[has], work.begin[some], floors.launch, ids[work.row[some]])
    return int((~has).sum())


def find_launch_points(built: HostThreads, work: GpuActivities) -> Int32Array:
    """The place of the point from which the work of each call leaves: its submission, else its end or start."""
    end, start = built.end[work.calls], built.start[work.calls]
    returned = end >= 0
    returned[returned] = built.time[end[returned]] <= work.first_start_by_call[returned]
    return np.where(built.submit >= 0, built.submit, np.where(returned, end, start)).astype(np.int32)


def _find_longer_predecessors(work: GpuActivities, later: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Pairs (earlier, later) of a stream where the one that ends last before is not the one that starts last."""
    if not later.size:
        return later, later
    # The running maximum of ends within each stream, and which has it: ends are made to rise from stream to stream.
    rank = np.argsort(np.argsort(work.end, kind="stable"), kind="stable") + work.stream * len(work.end)
    best = np.maximum.accumulate(rank)
    holder = np.maximum.accumulate(np.where(rank == best, np.arange(len(rank)), 0))[later - 1]
    ends = work.end[holder]
    other = (holder != later - 1) & (ends <= work.start[later])
    return holder[other], later[other]
