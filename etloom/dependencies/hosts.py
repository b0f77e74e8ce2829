"""Host threads as chains of points, each piece the time of the innermost event open in it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from etloom import kinds
from etloom._native import codes_of, tour
from etloom.dependencies.draft import Draft
from etloom.dependencies.events import WAITS, Events, Mask, ids_of, marks
from etloom.graphs import Codes, Kind, Numbers, Ticks

NO_SUBMISSION = np.iinfo(np.int64).min
_POLLS = r"EventQuery"


@dataclass(eq=False)
class Hosts:
    """The points of a rank's threads, thread after thread; ``point``: their numbers in the draft.

    Of points: ``time``, ``row`` (of the event in `events`). Of the piece of time that ends at
    each: ``owner`` (row, -1 idle, -2 where the thread begins), ``kind`` and ``floor``, which are changed where
    the piece turns out to be a wait. ``start``, ``end``: the place of an event's points by its row; ``submit``: that
    of the submission of each call that launched work; -1 where there is none.
    """

    point: Numbers
    time: Ticks
    row: Numbers
    owner: Numbers
    kind: Codes
    floor: Ticks
    start: Numbers
    end: Numbers
    submit: Numbers

    def waits(self, places: Ticks, floor: Ticks | int) -> None:
        """The pieces that end at these points are waits, of which only ``floor`` is time of the host itself."""
        self.kind[places] = Kind.WAIT
        self.floor[places] = np.minimum(self.floor[places], floor)

    def edges(self, draft: Draft, ids: Numbers) -> None:
        """Add the pieces to the draft; ids: of the events."""
        owners = ids_of(self.owner, ids)
        bounds = [*np.flatnonzero(self.owner == -2), len(self.owner)]
        for low, high in itertools.pairwise(bounds):
            draft.edges(
                self.kind[low + 1 : high],
                self.point[low : high - 1],
                self.point[low + 1 : high],
                self.floor[low + 1 : high],
                owners[low + 1 : high],
            )


def hosts(draft: Draft, events: Events, calls: Numbers, submission: Ticks, rank: int) -> tuple[Hosts, int]:
    """The threads of a rank, and how many were left out: those that only poll, or wait, in Python.

    calls: rows of events, ascending. submission: of each the time within it at which the device has its work.
    """
    lanes = events.lanes
    standing = events.host & (events.depth >= 0)
    works = standing & ~events.names.like(_POLLS) & ~events.cats.among(kinds.PYTHON)
    threads = int(lanes.max(initial=0)) + 1
    working = codes_of(works, lanes.view(np.uint32), threads)
    aside = int((codes_of(standing, lanes.view(np.uint32), threads) > working).sum())
    if aside:
        standing &= marks(working, lanes)

    row, role, time, owner, start, end, submit = tour(
        standing, lanes, events.start, events.end, events.depth, events.parent, calls, submission
    )
    point = draft.points(time, ids_of(row, events.id), role, rank)
    kind = np.where(owner >= 0, np.uint8(Kind.SEGMENT), np.uint8(Kind.IDLE))
    floor = np.empty_like(time)
    floor[:1] = 0
    np.subtract(time[1:], time[:-1], out=floor[1:])
    built = Hosts(point, time, row, owner, kind, floor, start, end, submit)
    return built, aside


def quiet(events: Events, built: Hosts) -> Mask:
    """Which pieces may be rest: nothing is open, or what runs no code of its own, or what is there to wait."""
    rests = events.cats.among(kinds.ANNOTATIONS | kinds.PYTHON) | events.names.like(WAITS)
    # The owner of idle time is -1, and that of nothing, where a thread begins, -2.
    still: Mask = np.append(rests, [False, True])[built.owner]
    return still
