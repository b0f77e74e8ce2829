"""Contract a dependency graph: merge chains of edges into single edges, to compute times after changed lags faster.

The time of a point with a single incoming edge is the time of the edge's source plus the lag. If the point also has a
single outgoing edge, it can be left out: a chain of edges through such points becomes one edge, whose lag is the sum of
the chain's lags. The times of the other points do not change. About a tenth of the points of a recorded job remain. A
change of lags is added to the sums of the chains, and times are computed on the contracted graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from etloom import _native
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array, UInt8Array


@dataclass(frozen=True, eq=False)
class ChainLags:
    """The lag of each chain of edges (``total``) and of its last edge (``last``, for path searches only), int64 ns."""

    total: Int64Array
    last: Int64Array | None

    @property
    def last_edges(self) -> Int64Array:
        """The lag of the last edge of each chain, ns; available if copied with ``for_paths``."""
        assert self.last is not None, "copied without"
        return self.last

    def copy(self, *, for_paths: bool) -> ChainLags:
        """Return a modifiable copy of the chain lags; ``for_paths``: with the last edges' lags, for path searches."""
        last = self.last.copy() if for_paths and self.last is not None else None
        return ChainLags(self.total.copy(), last)


@dataclass(frozen=True, eq=False)
class ContractedGraph:
    """A graph in which each chain (points with one incoming and one outgoing edge) is replaced by a single edge.

    ``points``: numbers of the kept points in the whole ``graph``, ascending. ``first`` and ``source``: the chains, as
    the edges of a `Graph`, between positions in ``points``. ``last``: the last edge of each chain in the whole graph.
    ``chain``: the chain of each edge of the whole graph.
    """

    graph: Graph
    points: Int32Array
    first: Int32Array
    source: Int32Array
    last: Int32Array
    chain: Int32Array

    @cached_property
    def last_kinds(self) -> UInt8Array:
        """The `EdgeKind` of the last edge of each chain."""
        return self.graph.kind[self.last]

    @cached_property
    def recorded_times(self) -> Int64Array:
        """The recorded time of each point of the contracted graph, ns. Not to be modified."""
        return self.graph.time[self.points]

    @cached_property
    def recorded(self) -> ChainLags:
        """The recorded lag of each chain of edges, ns. Not to be modified."""
        return self.sum_lags(self.graph.lag)

    def sum_lags(self, lag: Int64Array) -> ChainLags:
        """Return the lag of each chain: the sum of the lags of its edges, ns.

        ``lag``: of each edge of the whole graph, ns.
        """
        lags = ChainLags(np.zeros(len(self.last), np.int64), np.zeros(len(self.last), np.int64))
        _native.change_chains(self.chain, self.last, None, lag, lag, lags.total, lags.last)
        return lags

    def change(self, lags: ChainLags, edges: Int32Array, difference: Int64Array, lag: Int64Array) -> None:
        """Update chain lags in place after the lags of some edges of the uncontracted graph have changed.

        Args:
            difference: how much longer each edge takes, ns.
            lag: the time that it then takes, ns.
        """
        _native.change_chains(self.chain, self.last, edges, difference, lag, lags.total, lags.last)

    def find_positions(self, points: NDArray[np.integer]) -> Int64Array:
        """Return the positions in the contracted graph of points of the whole graph; all must exist in both graphs."""
        positions: Int64Array = np.searchsorted(self.points, points)
        return positions

    def compute_times(self, lags: ChainLags, start: Int64Array) -> Int64Array:
        """Return the time of each contracted-graph point, int64 ns. ``start``: as in `algorithms.compute_times`."""
        time = start.copy()
        _native.schedule(self.first, self.source, lags.total, time)
        return time

    def find_last_point(
        self, time: Int64Array, lags: ChainLags, read: Callable[[Int32Array], Int64Array]
    ) -> int:
        """Return the latest point of the whole graph; of several at the same time, that with the lowest number.

        Args:
            time: of the kept points with these lags, among them those that can be the last ones.
            read: returns the lags of edges of the whole graph.
        """
        graph, last_time = self.graph, time.max()
        pending = self.points[time == last_time].tolist()
        latest = set(pending)
        while pending:
            point = pending.pop()
            edges = np.arange(graph.first[point], graph.first[point + 1], dtype=np.int32)
            if len(edges) > 1:
                chains = self.chain[edges]
                edges = edges[time[self.source[chains]] + lags.total[chains] == last_time]
            before = set(graph.source[edges[read(edges) == 0]].tolist()) - latest
            latest |= before
            pending += before
        return int(min(latest))

    def find_longest_path(self, end: int, time: Int64Array, lags: ChainLags) -> Int32Array:
        """Return the edges of the longest (zero-slack) path to a point of the whole graph, by time.

        It is the path of `algorithms.find_longest_path`. time: of the kept points with these lags.
        """
        graph = self.graph
        position = int(np.searchsorted(self.points, end))
        is_point = position < len(self.points) and self.points[position] == end
        chain = None if is_point else self.chain[graph.first[end]]
        head = position if chain is None else int(self.source[chain])
        path = _native.walk_back(
            self.first, self.source, lags.total, lags.last_edges, time, self.last_kinds, head
        )
        if chain is not None:
            path = np.append(path, chain)
        edges: Int32Array = _native.expand_chains(
            graph.first, graph.source, self.points, self.source, self.last, path
        )
        return edges if chain is None else edges[: np.searchsorted(edges, graph.first[end]) + 1]


def contract_graph(graph: Graph, anchors: NDArray[np.bool_]) -> ContractedGraph:
    """Replace each chain of a graph by a single edge. ``anchors``: mask of points that must remain."""
    return ContractedGraph(graph, *_native.contract(graph.first, graph.source, anchors))


@dataclass(frozen=True, eq=False)
class GroupedEdges:
    """Edges of a graph sorted by chain, so that the minimum latencies of all edges can be scaled in one pass.

    ``runs``: the chain of each run of edges, ``bounds``: the end of each run, from 0, ``ends``: whether the last edge
    of a run is that of its chain. ``floors`` and ``rows``: minimum latency and row of each edge. ``others``: the edges
    that have a delay, or a minimum latency of more than 32 bits. Edges that take no time are left out.
    """

    MAX_FACTOR: ClassVar[float] = 2.0**20

    runs: Int32Array
    bounds: Int32Array
    ends: UInt8Array
    floors: Int32Array
    rows: Int32Array
    others: Int32Array

    @classmethod
    def group(cls, contraction: ContractedGraph, edges: Int32Array, rows: Int32Array) -> GroupedEdges:
        """Sort edges (ascending numbers) by chain. ``rows``: each edge's row in the mask of `scale`, negative for
        none."""
        graph, chains = contraction.graph, (contraction.chain, contraction.last)
        return cls(*_native.group_edges(*chains, edges, graph.min_latency, graph.unexplained, rows))

    def scale(
        self, times: float, marked: NDArray[np.bool_] | None, upper: ChainLags, lower: ChainLags
    ) -> int:
        """Multiply the minimum latencies of the edges by a factor, and update the lags of their chains in place.

        The latencies of ``others`` do not change.

        Args:
            times: factor, less than `MAX_FACTOR`.
            marked: mask of the rows whose edges change; None: all edges.
            upper: the lags of chains for paths.
            lower: further lags that change alike.

        Returns:
            How much longer all edges take, ns.
        """
        parts = self.runs, self.bounds, self.ends, self.floors, self.rows
        return _native.scale_groups(*parts, marked, times, upper.total, upper.last_edges, lower.total)


FIRST, LAST = 1, 2
"""Bits of `mark_extremes`."""


def mark_extremes(
    graph: Graph, *groups: Int32Array, lag: Int64Array | None = None
) -> list[NDArray[np.uint8]]:
    """Mark the points that can become the earliest (`FIRST`) or latest (`LAST`) of their group when edge lags change.

    The others cannot: from each of them an edge with a lag of at least 0 leads to another point of its group (or, for
    the first in time, from another point to it). Changed lags stay at least 0, and only synchronization edges are
    removed.

    Args:
        groups: numbers per point, negative for points without a group.
        lag: of each edge, ns, before any change; default: as recorded.

    Returns:
        The marks of each of the groupings.
    """
    usable = graph.kind != EdgeKind.SYNC
    usable &= (graph.lag if lag is None else lag) >= 0
    return [
        _native.mark_extremes(graph.first, graph.source, usable, np.ascontiguousarray(group))
        for group in groups
    ]
