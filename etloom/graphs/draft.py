"""A graph in the making: blocks of points and edges, put together at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from etloom.graphs.algorithms import (
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
    "floor": np.int64,
    "kind": np.uint8,
    "owner": np.int32,
}


class GraphDraft:
    """Points are numbered as they come; edges name them by these numbers.

    Where edges of no length run in a circle, those to a lower number give way: so points that are bound to an
    order, as those of a thread, are to be given in it.
    """

    def __init__(self) -> None:
        self.size = 0
        self._points, self._edges = _empty_columns(_POINT_DTYPES), _empty_columns(_EDGE_DTYPES)
        self._chain = [False]

    def points(
        self, time: ArrayLike, event: ArrayLike, role: PointRole | ArrayLike, rank: int | ArrayLike
    ) -> Int32Array:
        """Add points; returns their numbers. ``event``: ids, -1 for none."""
        first = self.begin(time, event, role, rank)
        return np.arange(first, self.size, dtype=np.int32)

    def begin(
        self, time: ArrayLike, event: ArrayLike, role: PointRole | ArrayLike, rank: int | ArrayLike
    ) -> int:
        """`points`, of which only the first number is returned; the others follow it."""
        count = len(np.asarray(time))
        _append_rows(self._points, _POINT_DTYPES, count, time=time, event=event, role=role, rank=rank)
        self.size += count
        return self.size - count

    def edges(
        self,
        kind: EdgeKind | ArrayLike,
        source: ArrayLike,
        target: ArrayLike,
        floor: ArrayLike,
        owner: ArrayLike = -1,
    ) -> None:
        """Add edges. A floor greater than what the recording took is cut to it."""
        count = len(np.asarray(source))
        _append_rows(
            self._edges,
            _EDGE_DTYPES,
            count,
            source=source,
            target=target,
            floor=floor,
            kind=kind,
            owner=owner,
        )
        self._chain.append(False)

    def chain(self, first: int, kind: UInt8Array, owner: Int32Array) -> None:
        """Add edges that take as long as they do: one from each point from ``first`` on to the next, but where the
        kind is `NO_EDGE`."""
        self.edges(kind, np.broadcast_to(first, len(kind)), first + 1, np.iinfo(np.int64).max, owner)
        self._chain[-1] = True

    def graph(self) -> Graph:
        """The graph of all that was added; the draft is empty afterwards."""
        points, edges, chain = self._points, self._edges, self._chain
        self.size = 0
        self._points, self._edges = _empty_columns(_POINT_DTYPES), _empty_columns(_EDGE_DTYPES)
        self._chain = [False]
        return assemble_graph(points, edges, chain)


def _empty_columns(dtypes: Mapping[str, Any]) -> dict[str, ColumnChunks]:
    """Columns of no rows."""
    return {name: [np.zeros(0, dtype)] for name, dtype in dtypes.items()}


def _append_rows(
    parts: dict[str, ColumnChunks], dtypes: Mapping[str, Any], count: int, **columns: ArrayLike
) -> None:
    for name, values in columns.items():
        parts[name].append(np.broadcast_to(np.asarray(values, dtypes[name]), count))
