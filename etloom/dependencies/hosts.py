"""Host threads as chains of points, each piece the time of the innermost event open in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom import kinds, stacks
from etloom._native import tour
from etloom.dependencies.draft import Draft
from etloom.graphs import Codes, Kind, Numbers, Role, Ticks
from etloom.trace import Trace

NO_SUBMISSION = np.iinfo(np.int64).min
_POLLS = r"EventQuery"
WAITS = r"(?i)::_?wait|^wait|::barrier|monitored_barrier"


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


def hosts(draft: Draft, trace: Trace, submission: Ticks, rank: int) -> tuple[Hosts, int]:
    """The threads of a linked trace, and how many were left out: those that only poll, or wait, in Python.

    submission: of each event the time within it at which the device has its work, NO_SUBMISSION for none.
    """
    events = trace.events
    starts = events["ts"].to_numpy()
    ends = starts + np.maximum(events["dur"].fill_null(0).to_numpy(), 0)
    lanes = stacks.lane_codes(events)
    standing = stacks.among(events["cat"], kinds.HOST) & events["depth"].is_not_null().to_numpy()
    standing &= events["dur"].is_not_null().to_numpy()
    asks = stacks.asked(events["name"], lambda name: name.str.contains(_POLLS))
    working = np.unique(lanes[standing & ~asks & ~stacks.among(events["cat"], kinds.PYTHON)])
    aside = standing & ~np.isin(lanes, working)
    standing &= ~aside

    rows = np.flatnonzero(standing)
    depth = events["depth"].fill_null(0).to_numpy()
    rows = rows[np.lexsort((depth[rows], starts[rows], lanes[rows]))]
    place_of = np.full(events.height + 1, -1, np.int64)  # so that place_of[-1] is -1
    place_of[rows] = np.arange(len(rows))
    parent = place_of[rows_of(events, events["parent"])[rows]]
    inside = (submission > starts) & (submission < ends)
    submit = np.where(inside, submission, NO_SUBMISSION)[rows]
    place, role, time, owner = tour(lanes[rows], starts[rows], ends[rows], parent, submit)

    row = rows[place].astype(np.int32)
    own = np.where(owner >= 0, rows[np.maximum(owner, 0)] if rows.size else owner, owner).astype(np.int32)
    point = draft.points(time, events["id"].to_numpy()[row], role, rank)
    floor = np.diff(time, prepend=time[:1])
    kind = np.where(own >= 0, Kind.SEGMENT, Kind.IDLE).astype(np.uint8)
    found = {}
    for what in (Role.START, Role.END, Role.SUBMIT):
        found[what] = np.full(events.height, -1, np.int32)
        at = np.flatnonzero(role == what)
        found[what][row[at]] = at
    built = Hosts(
        point,
        time,
        row,
        lanes[row],
        role,
        own,
        kind,
        floor,
        start=found[Role.START],
        end=found[Role.END],
        submit=found[Role.SUBMIT],
    )
    return built, len(np.unique(lanes[aside]))


def rows_of(events: pl.DataFrame, wanted: pl.Series) -> Ticks:
    """The rows of a table with these ids, which ascend in it; -1 for null and for an id it has not."""
    known = events["id"].to_numpy()
    asked = wanted.fill_null(0).to_numpy()
    # Ids of a table from which no row was taken are its row numbers.
    whole = known.size > 0 and known[0] == 0 and known[-1] == known.size - 1
    row = asked.astype(np.int64) if whole else np.searchsorted(known, asked)
    found = wanted.is_not_null().to_numpy() & (row < known.size)
    found[found] = known[row[found]] == asked[found]
    return np.where(found, row, -1).astype(np.int64)


def quiet(trace: Trace, built: Hosts) -> np.ndarray:
    """Which pieces may be rest: nothing is open, or what runs no code of its own, or what is there to wait."""
    events = trace.events
    rests = stacks.among(events["cat"], kinds.ANNOTATIONS | kinds.PYTHON)
    rests |= stacks.asked(events["name"], lambda name: name.str.contains(WAITS))
    still: np.ndarray = (built.owner == -1) | ((built.owner >= 0) & rests[np.maximum(built.owner, 0)])
    return still
