"""The dependency graph as arrays: points in time, and edges between them.

A point is an instant: an operator starts, a kernel ends. An edge states that its target comes at least a lag after
its source, so that

    time[target] = max over the edges into it of (time[source] + lag)

A point without incoming edges has a time of its own. The lag of an edge has two parts: ``min_latency``, the least
time that the edge is known to take, and ``unexplained``, the delay that was recorded beyond all minimum latencies and
that nothing in the graph explains. With both, `algorithms.compute_times` reproduces the recorded times to the
nanosecond, whatever the graph: that verifies the arithmetic, not the graph.

Points are numbered so that every edge goes forward; each algorithm is therefore a single sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etloom import _native
from etloom.core.machine import run_paired

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
UInt8Array = NDArray[np.uint8]
ColumnChunks = list[NDArray[Any]]
"""A column in chunks; a chunk of equal values may be one value broadcast to the length, without a copy."""

NO_EDGE = _native.NO_EDGE
"""The kind that marks a missing edge of a chain."""


class PointRole(IntEnum):
    """The instant of an event or collective that a graph point represents: start, end, submission or arrival."""

    START = 0
    END = 1
    SUBMIT = 2  # the instant inside a launch call at which the device has received the work
    ARRIVE = 3  # the last participant of a collective has arrived


class EdgeKind(IntEnum):
    """The reason why an edge's target comes after its source; among equally binding edges the highest is reported."""

    SEGMENT = 0  # host: time in the innermost open event
    IDLE = 1  # host: no event is open, so Python or the operating system
    WAIT = 2  # host: a blocking call, or a thread whose work another thread does
    COMPLETE = 3  # start to end of a range that ends on another thread
    KERNEL = 4  # start to end of a GPU activity
    LAUNCH = 5  # submission to start
    STREAM = 6  # end to start of the next activity on a stream
    OVERLAP = 7  # start to start of the next activity on a stream, if the two overlap
    STREAM_WAIT = 8  # end of what a stream waited for to the start of what waited
    SYNC = 9  # end of a GPU activity to the end of the call that waited for it
    HANDOFF = 10  # a thread rests while another thread begins to work
    RETURN = 11  # and continues when the other thread is done
    ARRIVAL = 12  # start on a rank to the arrival of the last rank
    TRANSFER = 13  # arrival of the last rank to the end on a rank
    MESSAGE = 14  # send to the end of its receive

    @property
    def label(self) -> str:
        """The name of the kind in lower case with spaces, as shown in tables."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, eq=False)
class Graph:
    """A dependency graph of n points and m edges, stored as arrays; built by `Graph.from_edges`.

    Per point: ``time`` int64 ns as recorded, ``event`` int32 (id in the `events` table of its rank, -1 for none),
    ``role`` uint8 (`PointRole`), ``rank`` int32 (-1 for an arrival, which belongs to no single rank).

    Per edge, sorted by target: ``source`` int32, ``min_latency`` int64 ns, ``kind`` uint8 (`EdgeKind`), ``owner``
    int32 (id of the event that the time is attributed to, -1 for none; in the target's rank or, if that is -1, in the
    source's).

    ``first`` int32 (n + 1): the edges into point v are first[v] to first[v + 1]. ``dropped`` int64: number of edges of
    each `EdgeKind` that were left out because they would lead backward in time.
    """

    time: Int64Array
    event: Int32Array
    role: UInt8Array
    rank: Int32Array
    first: Int32Array
    source: Int32Array
    min_latency: Int64Array
    kind: UInt8Array
    owner: Int32Array
    dropped: Int64Array

    @classmethod
    def from_edges(
        cls,
        *,
        time: Int64Array,
        event: Int32Array,
        role: UInt8Array,
        rank: Int32Array,
        source: Int32Array,
        target: Int32Array,
        min_latency: Int64Array,
        kind: UInt8Array,
        owner: Int32Array,
    ) -> Graph:
        """Build the graph from points in any order and edges between their positions.

        An edge that does not go forward in time is dropped; among simultaneous points, the order that edges of zero
        length require is used, and in a cycle of such edges those from a later to an earlier position are dropped. A
        minimum latency is cut to the recorded time. The time of a point beyond all its minimum latencies becomes the
        unexplained delay of the edge, or of all edges, that bind it.

        Raises:
            ValueError: an edge refers to a point that does not exist.
        """
        points: dict[str, ColumnChunks] = {"time": [time], "event": [event], "role": [role], "rank": [rank]}
        edges: dict[str, ColumnChunks] = {
            "source": [source],
            "target": [target],
            "min_latency": [min_latency],
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
        """The target point of each edge."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.first))

    @property
    def edge_ranks(self) -> Int32Array:
        """The rank of each edge: that of its target, or of its source if the target belongs to no single rank."""
        rank = self.rank[self.target]
        return np.where(rank >= 0, rank, self.rank[self.source])

    @cached_property
    def edges_of_ranks(self) -> tuple[Int32Array, list[Int64Array]]:
        """The ranks that have edges, ascending, and the edge indices of each. Computed on first access."""
        return _group_by_rank(self.edge_ranks)

    def group_points(self) -> Iterator[tuple[int, Int64Array]]:
        """Yield (rank, its points) for each rank that has points, ascending; rank -1 holds points of no single rank."""
        ranks, points = _group_by_rank(self.rank)
        return zip(ranks.tolist(), points, strict=True)

    def split_by_rank(self, ranks: Sequence[int]) -> Iterator[tuple[int, Graph]]:
        """Yield each rank with its subgraph: the points of the rank, the edges into them, and their sources."""
        if len(ranks) == 1:
            yield ranks[0], self
            return
        points = dict(self.group_points())
        for rank in ranks:
            yield rank, self._select_part(rank, points.get(rank, np.zeros(0, np.int64)))

    def _select_part(self, rank: int, targets: Int64Array) -> Graph:
        """Return the graph of the points of a rank (ascending), the edges into them, and their sources."""
        degrees = self.first[targets + 1] - self.first[targets]
        ends = np.cumsum(degrees)
        edges = np.repeat(self.first[targets] - ends + degrees, degrees) + np.arange(degrees.sum())
        sources = self.source[edges]
        others = np.unique(sources[self.rank[sources] != rank])  # few, such as arrivals
        points = np.sort(np.concatenate((targets, others)), kind="stable")  # merges two ascending parts
        first = np.zeros(points.size + 1, np.int32)
        first[np.searchsorted(points, targets) + 1] = degrees
        return Graph(
            **{name: getattr(self, name)[points] for name in ("time", "event", "role", "rank")},
            first=np.cumsum(first, dtype=np.int32),
            source=np.searchsorted(points, sources).astype(np.int32),
            **{name: getattr(self, name)[edges] for name in ("min_latency", "kind", "owner")},
            dropped=self.dropped,
        )

    @cached_property
    def unexplained(self) -> Int64Array:
        """The unexplained delay of each edge, int64 ns; 0 for edges that do not determine the time of their target.

        It is the recorded time of the target beyond the minimum latencies of all edges into it. Computed on first
        access.
        """
        delays: Int64Array = _native.excess(self.first, self.source, self.time, self.min_latency)
        return delays

    @property
    def lag(self) -> Int64Array:
        """The lag of each edge, int64 ns: its minimum latency plus its unexplained delay."""
        lag: Int64Array = self.min_latency + self.unexplained
        return lag

    def lag_of(self, edges: Int32Array) -> Int64Array:
        """Return the lags (minimum latency plus unexplained delay) of the edges ``edges``, int64 ns."""
        lag: Int64Array = self.min_latency[edges] + self.unexplained[edges]
        return lag

    @property
    def sources(self) -> Int32Array:
        """The points without incoming edges."""
        return np.flatnonzero(np.diff(self.first) == 0).astype(np.int32)

    @property
    def residual(self) -> Int64Array:
        """The unexplained delay of each point, int64 ns; 0 for points without incoming edges.

        It is the recorded time beyond the minimum latencies of all edges into the point.
        """
        residual: Int64Array = _native.residual(self.first, self.source, self.time, self.min_latency)
        return residual


def _group_by_rank(ranks: Int32Array) -> tuple[Int32Array, list[Int64Array]]:
    """Return the distinct values of ``ranks``, ascending, and the positions at which each occurs."""
    # Small numbers are sorted in linear time.
    is_small = ranks.size and ranks.min() >= -(2**15) and ranks.max() < 2**15
    order = np.argsort(ranks.astype(np.int16) if is_small else ranks, kind="stable")
    unique, first = np.unique(ranks[order], return_index=True)
    return unique, np.split(order, first[1:])


def assemble_graph(
    points: Mapping[str, ColumnChunks], edges: Mapping[str, ColumnChunks], is_chain: list[bool]
) -> Graph:
    """Build a graph from the columns of `Graph.from_edges`; each column is a list of at least one array chunk.

    The chunks are removed from their lists as they are used, so that no column is in memory twice for long.

    Args:
        is_chain: which chunks of the edges are chains; edge i of a chain connects the points i after the two that the
            chunk names. An edge of kind `NO_EDGE` does not exist.
    """
    number = _native.number_points(points["time"], edges["source"], edges["target"], edges["kind"], is_chain)
    columns = run_paired(
        lambda name: _reorder_column(points[name], number), ("time", "event", "role", "rank"), len(number)
    )
    first, source, min_latency, kind, owner, dropped_kinds = _native.order_edges(
        number,
        columns["time"],
        edges["source"],
        edges["target"],
        edges["min_latency"],
        edges["kind"],
        edges["owner"],
        is_chain,
    )
    dropped = np.bincount(dropped_kinds, minlength=len(EdgeKind)).astype(np.int64)
    return Graph(
        **columns,
        first=first,
        source=source,
        min_latency=min_latency,
        kind=kind,
        owner=owner,
        dropped=dropped,
    )


def _reorder_column(chunks: ColumnChunks, number: Int32Array) -> NDArray[Any]:
    """Concatenate the chunks of a column, put value i at position ``number[i]``, and clear the chunks."""
    nonempty = [chunk for chunk in chunks if chunk.size] or chunks[:1]
    chunks.clear()
    if nonempty[0].size and all(chunk.strides == (0,) and chunk[0] == nonempty[0][0] for chunk in nonempty):
        return np.broadcast_to(nonempty[0][0], len(number))
    values: NDArray[Any] = _native.numbered(nonempty, number)
    return values
