"""A graph under construction: points and edges are collected in blocks, and assembled at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from etloom.graphs.graph import (
    ColumnChunks,
    EdgeKind,
    Graph,
    Int32Array,
    PointRole,
    UInt8Array,
    assemble_graph,
)

_POINT_DTYPES = {"time": np.int64, "event": np.int32, "role": np.uint8, "rank": np.int32}
_EDGE_DTYPES = {
    "source": np.int32,
    "target": np.int32,
    "min_latency": np.int64,
    "kind": np.uint8,
    "owner": np.int32,
}


class GraphDraft:
    """Collects the points and edges of a graph. Points are numbered as they are added; edges refer to these numbers.

    In a cycle of edges of zero length, those to a lower number are dropped: add points with a fixed order, such as
    those of a thread, in that order.
    """

    def __init__(self) -> None:
        self.size = 0
        self._points, self._edges = _empty_columns(_POINT_DTYPES), _empty_columns(_EDGE_DTYPES)
        self._is_chain = [False]

    def add_points(
        self, time: ArrayLike, event: ArrayLike, role: PointRole | ArrayLike, rank: int | ArrayLike
    ) -> Int32Array:
        """Add points and return their numbers. ``event``: event ids, -1 for none."""
        first = self.add_point_block(time, event, role, rank)
        return np.arange(first, self.size, dtype=np.int32)

    def add_point_block(
        self, time: ArrayLike, event: ArrayLike, role: PointRole | ArrayLike, rank: int | ArrayLike
    ) -> int:
        """Add points with consecutive numbers, and return the number of the first."""
        count = len(np.asarray(time))
        _append_rows(self._points, _POINT_DTYPES, count, time=time, event=event, role=role, rank=rank)
        self.size += count
        return self.size - count

    def add_edges(
        self,
        kind: EdgeKind | ArrayLike,
        source: ArrayLike,
        target: ArrayLike,
        min_latency: ArrayLike,
        owner: ArrayLike = -1,
    ) -> None:
        """Add edges. A minimum latency (ns) above the recorded time of its edge is reduced to that time."""
        count = len(np.asarray(source))
        _append_rows(
            self._edges,
            _EDGE_DTYPES,
            count,
            source=source,
            target=target,
            min_latency=min_latency,
            kind=kind,
            owner=owner,
        )
        self._is_chain.append(False)

    def add_chain(self, first: int, kind: UInt8Array, owner: Int32Array) -> None:
        """Add edges between consecutive points, from the point ``first`` on, except where the edge's kind is `NO_EDGE`.

        The minimum latency of each edge is its recorded time.
        """
        self.add_edges(kind, np.broadcast_to(first, len(kind)), first + 1, np.iinfo(np.int64).max, owner)
        self._is_chain[-1] = True

    def build(self) -> Graph:
        """Build the graph from all points and edges added so far, and clear the draft."""
        points, edges, is_chain = self._points, self._edges, self._is_chain
        self.size = 0
        self._points, self._edges = _empty_columns(_POINT_DTYPES), _empty_columns(_EDGE_DTYPES)
        self._is_chain = [False]
        return assemble_graph(points, edges, is_chain)


def _empty_columns(dtypes: Mapping[str, Any]) -> dict[str, ColumnChunks]:
    """Return a dict with an empty array for each column of ``dtypes``."""
    return {name: [np.zeros(0, dtype)] for name, dtype in dtypes.items()}


def _append_rows(
    columns_so_far: dict[str, ColumnChunks], dtypes: Mapping[str, Any], count: int, **columns: ArrayLike
) -> None:
    for name, values in columns.items():
        columns_so_far[name].append(np.broadcast_to(np.asarray(values, dtypes[name]), count))
