"""Host threads as chains of points, each piece the time of the innermost event open in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from etloom._native import codes_of, tour
from etloom.core import categories
from etloom.graphs.algorithms import NO_EDGE, EdgeKind, Int32Array, Int64Array
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import WAIT_NAMES, EventArrays, Mask, ids_of_rows, look_up_mask

NO_SUBMISSION = np.iinfo(np.int64).min
_POLLING_CALLS = r"EventQuery"
_NO_WAIT_SEGMENTS = np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(eq=False)
class HostThreads:
    """The points of a rank's threads, thread after thread; ``base``: the number of the first in the draft.

    Of points: ``time``, ``row`` (of the event in `events`). Of the piece of time that ends at
    each: ``owner`` (row, -1 idle, -2 where the thread begins). ``waiting``: places where the piece turned out to be a
    wait, and the time of the host in it. ``start``, ``end``: the place of an event's points by its row; ``submit``:
    that of the submission of each call that launched work; -1 where there is none.
    """

    base: int
    time: Int64Array
    row: Int32Array
    owner: Int32Array
    start: Int32Array
    end: Int32Array
    submit: Int32Array
    waiting: list[tuple[Int64Array, Int64Array]] = field(default_factory=list)

    def waits(self, places: Int64Array, floor: Int64Array | int) -> None:
        """The pieces that end at these points are waits, of which only ``floor`` is time of the host itself."""
        self.waiting.append((places, np.broadcast_to(floor, len(places))))

    def edges(self, draft: GraphDraft, ids: Int32Array) -> None:
        """Add the pieces to the draft; ids: of the events."""
        owners = ids_of_rows(self.owner, ids)
        kind = np.where(self.owner >= 0, np.uint8(EdgeKind.SEGMENT), np.uint8(EdgeKind.IDLE))
        places, floor = (np.concatenate(part) for part in zip(_NO_WAIT_SEGMENTS, *self.waiting, strict=True))
        order = np.lexsort((floor, places))
        # Of several floors of one place the least.
        order = order[
            np.append(True, np.diff(places[order]) != 0)[: len(order)] & (self.owner[places[order]] != -2)
        ]
        places, floor = places[order], floor[order]
        kind[places] = NO_EDGE
        kind[self.owner == -2] = NO_EDGE
        draft.chain(self.base, kind[1:], owners[1:])
        point = self.base + places
        draft.edges(EdgeKind.WAIT, point - 1, point, floor, owners[places])


def add_host_threads(
    draft: GraphDraft, events: EventArrays, calls: Int32Array, submission: Int64Array, rank: int
) -> tuple[HostThreads, int]:
    """The threads of a rank, and how many were left out: those that only poll, or wait, in Python.

    calls: rows of events, ascending. submission: of each the time within it at which the device has its work.
    """
    lanes = events.lanes
    standing = events.host & (events.depth >= 0)
    works = standing & ~events.names.like(_POLLING_CALLS) & ~events.cats.among(categories.PYTHON_CATEGORIES)
    threads = int(lanes.max(initial=0)) + 1
    working = codes_of(works, lanes.view(np.uint32), threads)
    aside = int((codes_of(standing, lanes.view(np.uint32), threads) > working).sum())
    if aside:
        standing &= look_up_mask(working, lanes)

    row, role, time, owner, start, end, submit = tour(
        standing, lanes, events.start, events.end, events.depth, events.parent, calls, submission
    )
    base = draft.begin(time, ids_of_rows(row, events.id), role, rank)
    return HostThreads(base, time, row, owner, start, end, submit), aside


def mask_idle_segments(events: EventArrays, built: HostThreads) -> Mask:
    """Which pieces may be rest: nothing is open, or what runs no code of its own, or what is there to wait."""
    rests = events.cats.among(
        categories.ANNOTATION_CATEGORIES | categories.PYTHON_CATEGORIES
    ) | events.names.like(WAIT_NAMES)
    # The owner of idle time is -1, and that of nothing, where a thread begins, -2.
    still: Mask = np.append(rests, [False, True])[built.owner]
    return still
