"""A graph of points in time in arrays: schedule, longest path, slack, reach.

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

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etloom import _native

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
UInt8Array = NDArray[np.uint8]
ColumnChunks = list[NDArray[Any]]
"""A column in parts; of several rows of one value a part may be that value, repeated without a copy."""

NO_EDGE = _native.NO_EDGE
"""The kind of an edge of a chain that is not there."""


class PointRole(IntEnum):
    """What a point is to its event."""

    START = 0
    END = 1
    SUBMIT = 2  # the instant inside a launch call at which the device has the work
    ARRIVE = 3  # the last member of a collective has come


class EdgeKind(IntEnum):
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
    Of edges, sorted by target: ``source`` int32, ``floor`` int64 ns, ``kind`` uint8 (`Kind`), ``owner`` int32 (the id
    of the event whose time it is, -1 for none; of the target's rank or, where that has none, of the source's).
    ``first`` int32 (n + 1): the edges into v are first[v] to first[v + 1]. ``dropped`` int64: how many edges of each
    `Kind` would not go forward and were left out.
    """

    time: Int64Array
    event: Int32Array
    role: UInt8Array
    rank: Int32Array
    first: Int32Array
    source: Int32Array
    floor: Int64Array
    kind: UInt8Array
    owner: Int32Array
    dropped: Int64Array

    @classmethod
    def of(
        cls,
        *,
        time: Int64Array,
        event: Int32Array,
        role: UInt8Array,
        rank: Int32Array,
        source: Int32Array,
        target: Int32Array,
        floor: Int64Array,
        kind: UInt8Array,
        owner: Int32Array,
    ) -> Graph:
        """The graph of points in any order and edges between their places in it.

        An edge that does not go forward in (time, the order that edges of no length ask for) is dropped; where
        edges of no length run in a circle, those from a later to an earlier place are. A floor is cut to what
        the recording took; what a point took beyond all its floors becomes the excess of the edge that binds
        it, or of all that do. Raises ValueError for an edge to a point that is not there.
        """
        points: dict[str, ColumnChunks] = {"time": [time], "event": [event], "role": [role], "rank": [rank]}
        edges: dict[str, ColumnChunks] = {
            "source": [source],
            "target": [target],
            "floor": [floor],
            "kind": [kind],
            "owner": [owner],
        }
        return assemble_graph(points, edges, [False])

    def __len__(self) -> int:
        """The number of points."""
        return len(self.time)

    def __repr__(self) -> str:
        return f"<Graph: {len(self):,} points, {len(self.source):,} edges>"

    @property
    def target(self) -> Int32Array:
        """The target of each edge."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.first))

    @cached_property
    def excess(self) -> Int64Array:
        """Of each edge what the recording took beyond the floors of all edges into its target, if it is one of those
        that bind it, else 0; int64 ns. Made when it is first asked for."""
        excess: Int64Array = _native.excess(self.first, self.source, self.time, self.floor)
        return excess

    @property
    def lag(self) -> Int64Array:
        """floor + excess of each edge."""
        lag: Int64Array = self.floor + self.excess
        return lag

    @property
    def sources(self) -> Int32Array:
        """The points that no edge leads to."""
        return np.flatnonzero(np.diff(self.first) == 0).astype(np.int32)

    @property
    def residual(self) -> Int64Array:
        """Of each point the excess of the edges that bind it; 0 of a point that no edge leads to."""
        residual: Int64Array = _native.residual(self.first, self.source, self.time, self.floor)
        return residual


def assemble_graph(
    points: Mapping[str, ColumnChunks], edges: Mapping[str, ColumnChunks], chain: list[bool]
) -> Graph:
    """`Graph.of` columns in parts, one at least, which are taken out of their lists so that none is there twice for
    long.

    chain: which parts of the edges are chains, whose edge i leads between the points i after those that the part names.
    An edge of kind `NO_EDGE` is not there.
    """
    number = _native.number_points(points["time"], edges["source"], edges["target"], edges["kind"], chain)
    columns = {name: _reorder_column(points[name], number) for name in ("time", "event", "role", "rank")}
    first, source, floor, kind, owner, left = _native.order_edges(
        number,
        columns["time"],
        edges["source"],
        edges["target"],
        edges["floor"],
        edges["kind"],
        edges["owner"],
        chain,
    )
    dropped = np.bincount(left, minlength=len(EdgeKind)).astype(np.int64)
    return Graph(**columns, first=first, source=source, floor=floor, kind=kind, owner=owner, dropped=dropped)


def _reorder_column(parts: ColumnChunks, number: Int32Array) -> NDArray[Any]:
    """The values of a column, each at its number; the parts are dropped."""
    taken = [part for part in parts if part.size] or parts[:1]
    parts.clear()
    if taken[0].size and all(part.strides == (0,) and part[0] == taken[0][0] for part in taken):
        return np.broadcast_to(taken[0][0], len(number))
    values: NDArray[Any] = _native.numbered(taken, number)
    return values


def compute_times(graph: Graph, lag: Int64Array | None = None, start: Int64Array | None = None) -> Int64Array:
    """The time of each point with other lags (m) or other own times of the sources (n; the rest is not read).

    An edge that is to be gone has the lag `NEVER`. Raises ValueError for arrays of another length.
    """
    time = np.array(graph.time if start is None else start, dtype=np.int64)
    lag = graph.lag if lag is None else np.ascontiguousarray(lag, dtype=np.int64)
    _native.schedule(graph.first, graph.source, lag, time)
    return time


REMOVED_LAG = np.int64(-(2**61))
"""The lag of an edge that asks for nothing. A point with no other edge would come before all time: see `start`."""


def compute_makespan(graph: Graph, time: Int64Array | None = None) -> int:
    """From the first to the last of the times (default: recorded), ns; 0 of an empty graph."""
    time = graph.time if time is None else time
    return int(time.max() - time.min()) if len(time) else 0


def find_longest_path(
    graph: Graph, end: int | None = None, time: Int64Array | None = None, lag: Int64Array | None = None
) -> Int32Array:
    """The edges that lead from a source to the point ``end`` (default: the last in time) without any play.

    In the order of time; their lags and the own time of the source sum to the time of ``end``. Where several edges
    set the time of a point, the one from the latest source is taken, then of the highest `Kind`: the nearest and
    most telling reason.
    """
    if not len(graph):
        return np.zeros(0, np.int32)
    # Among floors, at the recorded times, those bind that have excess.
    lag = _default_lags(graph, time) if lag is None else np.ascontiguousarray(lag, dtype=np.int64)
    time = graph.time if time is None else time
    at = end if end is not None else int(np.argmax(time))
    path: Int32Array = _native.walk_back(graph.first, graph.source, lag, time, graph.kind, at)
    return path


def _default_lags(graph: Graph, time: Int64Array | None) -> Int64Array:
    """The lags as which sweeps take those of the graph: floors where the times are the recorded ones."""
    return graph.floor if time is None else graph.lag


def compute_slack(
    graph: Graph, ends: ArrayLike | None = None, time: Int64Array | None = None, lag: Int64Array | None = None
) -> Int64Array:
    """How much later each point could come without the makespan growing, ns.

    ends: points that must not come later than they do (default: no point may come after the last one).
    """
    recorded = graph.time if time is None and lag is None else None
    lag = _default_lags(graph, time) if lag is None else np.ascontiguousarray(lag, dtype=np.int64)
    time = graph.time if time is None else time
    bound = np.full(len(graph), time.max() if len(time) else 0, np.int64)
    if ends is not None:
        # Far, and yet no lag that is taken from it wraps around.
        bound[:] = np.iinfo(np.int64).max // 2
        bound[np.asarray(ends)] = time[np.asarray(ends)]
    _native.latest(graph.first, graph.source, lag, recorded, bound)
    bound -= time
    return bound


def mark_reachable(graph: Graph, points: ArrayLike, *, backward: bool = False) -> NDArray[np.bool_]:
    """Which points these points lead to, themselves included; or (backward) which lead to them."""
    reached = np.zeros(len(graph), np.uint8)
    reached[np.asarray(points)] = 1
    _native.reach(graph.first, graph.source, reached, backward)
    return reached.view(np.bool_)
