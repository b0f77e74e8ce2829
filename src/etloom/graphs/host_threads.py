"""Add host threads to the graph as chains of points; each segment belongs to the innermost open event."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from etloom._native import codes_of, tour
from etloom.core import categories
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import WAIT_NAMES, EventArrays, Mask, ids_of_rows, look_up_mask
from etloom.graphs.graph import NO_EDGE, EdgeKind, Int32Array, Int64Array

NO_SUBMISSION = np.iinfo(np.int64).min
_POLLING_CALLS = r"EventQuery"
_NO_WAIT_SEGMENTS = np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(eq=False)
class HostThreads:
    """The graph points of a rank's host threads, thread by thread; ``base``: number of the first point in the draft.

    Per point: ``time``, ``row`` (of the event in `events`), ``owner`` of the segment that ends here (row, -1 for idle,
    -2 at the beginning of a thread). ``waiting``: places whose segment is a wait, and the host's own time in it.
    ``start``, ``end``: place of an event's points by its row; ``submit``: place of the submission of each call that
    launched work; -1 for none.
    """

    base: int
    time: Int64Array
    row: Int32Array
    owner: Int32Array
    start: Int32Array
    end: Int32Array
    submit: Int32Array
    waiting: list[tuple[Int64Array, Int64Array]] = field(default_factory=list)

    def mark_waits(self, places: Int64Array, min_latency: Int64Array | int) -> None:
        """Mark the thread segments that end at the points ``places`` as waits with ``min_latency`` ns of host work."""
        self.waiting.append((places, np.broadcast_to(min_latency, len(places))))

    def add_edges(self, draft: GraphDraft, ids: Int32Array) -> None:
        """Add an edge per segment (time between consecutive points of a thread) to the draft. ``ids``: event ids."""
        owners = ids_of_rows(self.owner, ids)
        kind = np.where(self.owner >= 0, np.uint8(EdgeKind.SEGMENT), np.uint8(EdgeKind.IDLE))
        places, min_latency = (
            np.concatenate(part) for part in zip(_NO_WAIT_SEGMENTS, *self.waiting, strict=True)
        )
        order = np.lexsort((min_latency, places))
        # If a place has several minimum latencies, the smallest.
        order = order[
            np.append(True, np.diff(places[order]) != 0)[: len(order)] & (self.owner[places[order]] != -2)
        ]
        places, min_latency = places[order], min_latency[order]
        kind[places] = NO_EDGE
        kind[self.owner == -2] = NO_EDGE
        draft.add_chain(self.base, kind[1:], owners[1:])
        point = self.base + places
        draft.add_edges(EdgeKind.WAIT, point - 1, point, min_latency, owners[places])


def mark_thread_events(events: EventArrays) -> tuple[Mask, int]:
    """Return a mask of the events on the threads that the graph includes, and the number of threads left out.

    Left out are threads that only poll, only run Python, or only execute asynchronous ranges: the work in such a range
    belongs to it.
    """
    thread = events.threads
    on_stack = events.host & (events.depth >= 0)
    is_work = (
        on_stack
        & ~events.names.match_pattern(_POLLING_CALLS)
        & ~events.cats.match_values(categories.PYTHON_CATEGORIES)
        & ~_mask_inside_ranges(events, thread)
    )
    threads = int(thread.max(initial=0)) + 1
    working = codes_of(is_work, thread.view(np.uint32), threads)
    excluded = int((codes_of(on_stack, thread.view(np.uint32), threads) > working).sum())
    if excluded:
        on_stack &= look_up_mask(working, thread)
    return on_stack, excluded


def add_host_threads(
    draft: GraphDraft,
    events: EventArrays,
    marked: Mask,
    calls: Int32Array,
    submission: Int64Array,
    rank: int,
) -> HostThreads:
    """Add the points of a rank's host threads to the draft, and return them.

    Args:
        marked: the result of `mark_thread_events`.
        calls: rows of launch calls, ascending.
        submission: per call, the time at which the device has its work, ns.
    """
    row, role, time, owner, start, end, submit = tour(
        marked, events.threads, events.start, events.end, events.depth, events.parent, calls, submission
    )
    base = draft.add_point_block(time, ids_of_rows(row, events.id), role, rank)
    return HostThreads(base, time, row, owner, start, end, submit)


def _mask_inside_ranges(events: EventArrays, thread: Int32Array) -> Mask:
    """Return a mask of the host events that lie within an asynchronous range on the same thread."""
    inside = np.zeros(len(events), bool)
    ranges = np.flatnonzero(events.host & (events.depth < 0))
    for number in np.unique(thread[ranges]):
        in_thread = ranges[thread[ranges] == number]
        in_thread = in_thread[np.argsort(events.start[in_thread], kind="stable")]
        latest_end = np.maximum.accumulate(events.end[in_thread])
        rows = np.flatnonzero(thread == number)
        at = np.searchsorted(events.start[in_thread], events.start[rows], side="right") - 1
        inside[rows] = (at >= 0) & (events.end[rows] <= latest_end[at])
    return inside


def mask_idle_segments(events: EventArrays, threads: HostThreads) -> Mask:
    """Return a mask of the thread segments that may be idle: no event is open, or it only annotates or waits."""
    is_restful = events.cats.match_values(
        categories.ANNOTATION_CATEGORIES | categories.PYTHON_CATEGORIES
    ) | events.names.match_pattern(WAIT_NAMES)
    # The owner of idle time is -1, and at the beginning of a thread -2.
    idle: Mask = np.append(is_restful, [False, True])[threads.owner]
    return idle


# Find threads that alternate (while one works, another pauses), and add the dependencies between them to the graph.

MIN_REST_NS = 50_000
"""A shorter rest does not count as a wait."""

_BACKWARD = r"^autograd::engine::evaluate_function"


def find_rests(threads: HostThreads, idle: Mask) -> Int64Array:
    """Return the indices of the thread points at which a pause of more than `MIN_REST_NS` ends.

    Call it before any segment is marked as a wait.
    """
    places = np.flatnonzero(idle)
    return places[threads.time[places] - threads.time[places - 1] > MIN_REST_NS]


def add_inter_thread_edges(
    draft: GraphDraft, events: EventArrays, threads: HostThreads, idle: Mask, rests: Int64Array
) -> int:
    """Add edges between threads that alternate, and mark their pauses as waits; return the number of pauses.

    Thread M rests from time a to b. Thread B has points in that time, and rested before the first of them, f: so f
    waited for a. If B also rests from its last point until b, or is a thread of the autograd engine, which reports back
    from inside an operator, then b waited for that last point.
    """
    n = len(threads.time)
    first = np.flatnonzero(threads.owner == -2)
    bounds = np.append(first, n)
    pids = events.pid[threads.row[first]]
    backward = events.names.match_pattern(_BACKWARD)[threads.row]
    # A thread is at rest after its last point.
    after = np.append(idle[1:] | (threads.owner[1:] == -2), True)
    before = idle | (threads.owner == -2)
    handoffs = []
    for m in range(len(first)):
        thread_rests = rests[(rests >= bounds[m]) & (rests < bounds[m + 1])]
        for b in range(len(first)):
            if b == m or pids[b] != pids[m] or not thread_rests.size:
                continue
            low, high = bounds[b], bounds[b + 1]
            times = threads.time[low:high]
            f = low + np.searchsorted(times, threads.time[thread_rests - 1], side="left")
            last = low + np.searchsorted(times, threads.time[thread_rests], side="right") - 1
            ok = f <= last
            ok[ok] = before[f[ok]] & (after[last[ok]] | backward[low:high].any())
            handoffs.append((thread_rests[ok], f[ok], last[ok]))
    if not handoffs:
        return 0
    gap, f, last = (np.concatenate(part) for part in zip(*handoffs, strict=True))
    threads.mark_waits(np.unique(np.concatenate([gap, f[threads.owner[f] != -2]])), 0)
    pairs = np.concatenate([np.stack([gap - 1, f]), np.stack([last, gap])], axis=1)
    kind = np.repeat([EdgeKind.HANDOFF, EdgeKind.RETURN], len(gap))
    # Both threads yield the same pair; keep that of the thread that began first.
    pairs, indices = np.unique(pairs, axis=1, return_index=True)
    draft.add_edges(kind[indices], threads.base + pairs[0], threads.base + pairs[1], 0)
    return len(gap)
