"""Host threads as chains of points, each piece the time of the innermost event open in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from etloom import kinds, stacks
from etloom._native import tour
from etloom.dependencies.draft import Draft
from etloom.dependencies.events import WAITS, Events, Mask
from etloom.graphs import Codes, Kind, Numbers, Role, Ticks

NO_SUBMISSION = np.iinfo(np.int64).min
_POLLS = r"EventQuery"


@dataclass(eq=False)
class Hosts:
    """The points of a rank's threads, thread after thread; ``point``: their numbers in the draft.

    Of points: ``time``, ``row`` (of the event in `events`), ``lane``, ``role``. Of the piece of time that ends at
    each: ``owner`` (row, -1 idle, -2 where the thread begins), ``kind`` and ``floor``, which are changed where
    the piece turns out to be a wait. ``start``, ``end``, ``submit``: the place of an event's points by its row,
    -1 where it has none.
    """

    point: Numbers
    time: Ticks
    row: Numbers
    lane: Ticks
    role: Codes
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

    def edges(self, draft: Draft, ids: Ticks) -> None:
        """Add the pieces to the draft."""
        some = np.flatnonzero(self.owner != -2)
        owner = self.owner[some]
        draft.edges(
            self.kind[some],
            self.point[some - 1],
            self.point[some],
            self.floor[some],
            np.where(owner >= 0, ids[owner], -1),
        )


def hosts(draft: Draft, events: Events, submission: Ticks, rank: int) -> tuple[Hosts, int]:
    """The threads of a rank, and how many were left out: those that only poll, or wait, in Python.

    submission: of each event the time within it at which the device has its work, NO_SUBMISSION for none.
    """
    lanes = stacks.lane_codes(events.table)
    standing = events.host & (events.depth >= 0)
    works = standing & ~events.names.like(_POLLS) & ~events.cats.among(kinds.PYTHON)
    working, seen = np.zeros((2, int(lanes.max(initial=0)) + 1), bool)
    working[lanes[works]] = True
    seen[lanes[standing]] = True
    standing &= working[lanes]

    rows = _in_order(events, np.flatnonzero(standing), lanes)
    place_of = np.full(len(events) + 1, -1, np.int64)  # so that place_of[-1] is -1
    place_of[rows] = np.arange(len(rows))
    submit = submission[rows]
    submit[(submit <= events.start[rows]) | (submit >= events.end[rows])] = NO_SUBMISSION
    place, role, time, owner = tour(
        lanes[rows], events.start[rows], events.end[rows], place_of[events.parent[rows]], submit
    )

    row = rows[place]
    own = owner.copy()
    own[owner >= 0] = rows[owner[owner >= 0]]
    point = draft.points(time, events.id[row], role, rank)
    at = np.full((3, len(events)), -1, np.int32)
    at[role, row] = np.arange(len(row))
    built = Hosts(
        point,
        time,
        row,
        lanes[row],
        role,
        own,
        kind=np.where(own >= 0, Kind.SEGMENT, Kind.IDLE).astype(np.uint8),
        floor=np.diff(time, prepend=time[:1]),
        start=at[Role.START],
        end=at[Role.END],
        submit=at[Role.SUBMIT],
    )
    return built, int((seen & ~working).sum())


def _in_order(events: Events, rows: Ticks, lanes: Ticks) -> Ticks:
    """The rows thread after thread, each by start, what is around first."""
    lane = lanes[rows]
    # Few threads: numpy sorts small numbers by their digits. The table is in the order of start.
    rows = rows[np.argsort(lane.astype(np.uint16) if lane.max(initial=0) < 1 << 16 else lane, kind="stable")]
    start, depth, lane = events.start[rows], events.depth[rows], lanes[rows]
    before = (start[1:] < start[:-1]) | ((start[1:] == start[:-1]) & (depth[1:] < depth[:-1]))
    if (before & (lane[1:] == lane[:-1])).any():
        rows = rows[np.lexsort((depth, start, lane))]
    return rows


def quiet(events: Events, built: Hosts) -> Mask:
    """Which pieces may be rest: nothing is open, or what runs no code of its own, or what is there to wait."""
    rests = events.cats.among(kinds.ANNOTATIONS | kinds.PYTHON) | events.names.like(WAITS)
    owner = np.maximum(built.owner, 0)
    still: Mask = (built.owner == -1) | ((built.owner >= 0) & rests[owner])
    return still
