"""A graph of points in time in arrays: schedule, longest path, slack, reach, subgraph, contraction.

A point is an instant: an operator starts, a kernel ends. An edge says that its target comes at least a lag after
its source, so that

    time[target] = max over the edges into it of (time[source] + lag)

and a point without edges into it has a time of its own. The lag of an edge is kept in two parts: ``floor``, the
least that the edge is known to take, and ``excess``, what the recording took beyond all floors and nothing in the
graph explains. With both, `schedule` gives the recorded times to the nanosecond, whatever the graph: that proves
the arithmetic, never the graph.

Points are numbered in an order in which every edge goes forward, so that each algorithm is one sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etloom import _native

Ticks = NDArray[np.int64]
Numbers = NDArray[np.int32]
Codes = NDArray[np.uint8]


class Role(IntEnum):
    """What a point is to its event."""

    START = 0
    END = 1
    SUBMIT = 2  # the instant inside a launch call at which the device has the work
    ARRIVE = 3  # the last member of a collective has come


class Kind(IntEnum):
    """Why a target comes after its source. Of equal reasons the higher one is named."""

    SEGMENT = 0  # host: the time of the innermost open event
    IDLE = 1  # host: no event is open, so Python or the operating system
    WAIT = 2  # host: a call that waits, or a thread whose work another one does
    COMPLETE = 3  # start to end of a range that ends on another thread
    KERNEL = 4  # start to end of device work
    LAUNCH = 5  # submission to start
    STREAM = 6  # end to start of the next on a stream
    OVERLAP = 7  # start to start of the next on a stream, where they ran together
    STREAM_WAIT = 8  # end of what a stream waited for to start of what waited
    SYNC = 9  # end of device work to the end of the call that waited for it
    HANDOFF = 10  # a thread rests while another one begins
    RETURN = 11  # and goes on when that one is done
    ARRIVAL = 12  # start on a rank to the arrival of the last
    TRANSFER = 13  # arrival of the last to the end on a rank
    MESSAGE = 14  # send to the end of its receive

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, eq=False)
class Graph:
    """n points and m edges; `of` makes one.

    Of points: ``time`` int64 ns as recorded, ``event`` int32 (the id in `events` of its rank, -1 for none),
    ``role`` uint8 (`Role`), ``rank`` int32 (-1 of an arrival, which is of no rank).
    Of edges, sorted by target: ``source`` int32, ``floor`` and ``excess`` int64 ns, ``kind`` uint8 (`Kind`),
    ``owner`` int32 (the id of the event whose time it is, -1 for none; of the target's rank or, where that has
    none, of the source's). ``first`` int32 (n + 1): the edges into v are first[v] to first[v + 1].
    ``dropped`` int64: how many edges of each `Kind` would not go forward and were left out.
    """

    time: Ticks
    event: Numbers
    role: Codes
    rank: Numbers
    first: Numbers
    source: Numbers
    floor: Ticks
    excess: Ticks
    kind: Codes
    owner: Numbers
    dropped: Ticks

    @classmethod
    def of(
        cls,
        *,
        time: Ticks,
        event: Numbers,
        role: Codes,
        rank: Numbers,
        source: Numbers,
        target: Numbers,
        floor: Ticks,
        kind: Codes,
        owner: Numbers,
    ) -> Graph:
        """The graph of points in any order and edges between their places in it.

        An edge that does not go forward in (time, the order that edges of no length ask for) is dropped; where
        edges of no length run in a circle, those from a later to an earlier place are. A floor is cut to what
        the recording took; what a point took beyond all its floors becomes the excess of the edge that binds
        it, or of all that do. Raises ValueError for an edge to a point that is not there.
        """
        columns: dict[str, NDArray[Any]] = {"time": time, "event": event, "role": role, "rank": rank}
        columns |= {"source": source, "target": target, "floor": floor, "kind": kind, "owner": owner}
        return ordered(columns)

    def __len__(self) -> int:
        """The number of points."""
        return len(self.time)

    def __repr__(self) -> str:
        return f"<Graph: {len(self):,} points, {len(self.source):,} edges>"

    @property
    def target(self) -> Numbers:
        """The target of each edge."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.first))

    @property
    def lag(self) -> Ticks:
        """floor + excess of each edge."""
        lag: Ticks = self.floor + self.excess
        return lag

    @property
    def sources(self) -> Numbers:
        """The points that no edge leads to."""
        return np.flatnonzero(np.diff(self.first) == 0).astype(np.int32)

    @property
    def residual(self) -> Ticks:
        """Of each point the excess of the edges that bind it; 0 of a point that no edge leads to."""
        most = np.zeros(len(self), np.int64)
        some = np.flatnonzero(self.excess)
        np.maximum.at(most, np.searchsorted(self.first, some, side="right") - 1, self.excess[some])
        return most


def ordered(columns: dict[str, NDArray[Any]]) -> Graph:
    """`Graph.of` these columns, which are taken out of the dictionary so that none is there twice for long."""
    order, first, source, edges, left = _native.order_points(
        columns["time"], columns.pop("source"), columns.pop("target")
    )
    columns["dropped"] = np.bincount(columns["kind"][left], minlength=len(Kind)).astype(np.int64)
    for name in ("time", "event", "role", "rank"):
        columns[name] = columns[name][order]
    del order
    for name in ("floor", "kind", "owner"):
        columns[name] = columns[name][edges]
    del edges
    excess = _native.bind_floors(first, source, columns["time"], columns["floor"])
    return Graph(first=first, source=source, excess=excess, **columns)


def schedule(graph: Graph, lag: Ticks | None = None, start: Ticks | None = None) -> Ticks:
    """The time of each point with other lags (m) or other own times of the sources (n; the rest is not read).

    An edge that is to be gone has the lag `NEVER`. Raises ValueError for arrays of another length.
    """
    time = np.array(graph.time if start is None else start, dtype=np.int64)
    _native.schedule(graph.first, graph.source, *_lags(graph, lag), time)
    return time


def _lags(graph: Graph, lag: Ticks | None) -> tuple[Ticks, Ticks | None]:
    """What the native sweeps add up to the lag of each edge: by default `Graph.lag`, without making it."""
    return (graph.floor, graph.excess) if lag is None else (np.ascontiguousarray(lag, dtype=np.int64), None)


NEVER = np.int64(-(2**61))
"""The lag of an edge that asks for nothing. A point with no other edge would come before all time: see `start`."""


def makespan(graph: Graph, time: Ticks | None = None) -> int:
    """From the first to the last of the times (default: recorded), ns; 0 of an empty graph."""
    time = graph.time if time is None else time
    return int(time.max() - time.min()) if len(time) else 0


def longest_path(
    graph: Graph, end: int | None = None, time: Ticks | None = None, lag: Ticks | None = None
) -> Numbers:
    """The edges that lead from a source to the point ``end`` (default: the last in time) without any play.

    In the order of time; their lags and the own time of the source sum to the time of ``end``. Where several edges
    set the time of a point, the one from the latest source is taken, then of the highest `Kind`: the nearest and
    most telling reason.
    """
    if not len(graph):
        return np.zeros(0, np.int32)
    time = graph.time if time is None else time
    at = end if end is not None else int(np.argmax(time))
    path: Numbers = _native.walk_back(graph.first, graph.source, *_lags(graph, lag), time, graph.kind, at)
    return path


def slack(
    graph: Graph, ends: ArrayLike | None = None, time: Ticks | None = None, lag: Ticks | None = None
) -> Ticks:
    """How much later each point could come without the makespan growing, ns.

    ends: points that must not come later than they do (default: no point may come after the last one).
    """
    time = graph.time if time is None else time
    bound = np.full(len(graph), time.max() if len(time) else 0, np.int64)
    if ends is not None:
        # Far, and yet no lag that is taken from it wraps around.
        bound[:] = np.iinfo(np.int64).max // 2
        bound[np.asarray(ends)] = time[np.asarray(ends)]
    _native.latest(graph.first, graph.source, *_lags(graph, lag), bound)
    bound -= time
    return bound


def reach(graph: Graph, points: ArrayLike, *, backward: bool = False) -> NDArray[np.bool_]:
    """Which points these points lead to, themselves included; or (backward) which lead to them."""
    reached = np.zeros(len(graph), np.uint8)
    reached[np.asarray(points)] = 1
    _native.reach(graph.first, graph.source, reached, backward)
    return reached.view(np.bool_)


def subgraph(graph: Graph, points: NDArray[np.bool_]) -> Graph:
    """The marked points and the edges between them; what was cut off becomes excess, or a source's own time."""
    number = np.cumsum(points, dtype=np.int32) - 1
    target = graph.target
    inside = points[graph.source] & points[target]
    return Graph.of(
        time=graph.time[points],
        event=graph.event[points],
        role=graph.role[points],
        rank=graph.rank[points],
        source=number[graph.source[inside]],
        target=number[target[inside]],
        floor=graph.floor[inside],
        kind=graph.kind[inside],
        owner=graph.owner[inside],
    )


@dataclass(frozen=True, eq=False)
class Contraction:
    """A graph of fewer points with the same times.

    ``graph`` holds the points into which several edges lead, and the sources: ``kept`` (numbers in the whole
    graph). Every other point v comes ``offset[v]`` after the kept point ``head[v]`` (a number in ``graph``).
    Every edge into a kept point is still there, its lag longer by the offset of its source.
    """

    graph: Graph
    kept: Numbers
    head: Numbers
    offset: Ticks

    def expand(self, time: Ticks) -> Ticks:
        """The times of all points of the whole graph from those of the kept ones."""
        times: Ticks = time[self.head] + self.offset
        return times


def contract(graph: Graph, lag: Ticks | None = None) -> Contraction:
    """Merge every point into which one edge leads with that edge's source, by pointer doubling."""
    lag = graph.lag if lag is None else lag
    degree = np.diff(graph.first)
    single = degree == 1
    head = np.arange(len(graph), dtype=np.int32)
    offset = np.zeros(len(graph), np.int64)
    only = graph.first[:-1][single]
    head[single] = graph.source[only]
    offset[single] = lag[only]
    while True:
        further = head[head]
        if np.array_equal(further, head):
            break
        offset += offset[head]
        head = further
    kept = np.flatnonzero(~single).astype(np.int32)
    number = np.cumsum(~single, dtype=np.int32) - 1
    edges = np.flatnonzero(np.repeat(~single, degree))
    source = graph.source[edges]
    smaller = replace(
        graph,
        time=graph.time[kept],
        event=graph.event[kept],
        role=graph.role[kept],
        rank=graph.rank[kept],
        first=np.concatenate([[0], np.cumsum(degree[kept])]).astype(np.int32),
        source=number[head[source]],
        floor=lag[edges] - graph.excess[edges] + offset[source],
        excess=graph.excess[edges],
        kind=graph.kind[edges],
        owner=graph.owner[edges],
    )
    return Contraction(smaller, kept, number[head], offset)
