"""Algorithms on dependency graphs: point times after changes of edge lags, longest path, slack, and reachability.

Each is one sweep over the points, which are numbered so that every edge goes forward.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from etloom import _native
from etloom.core import categories
from etloom.core.trace import Job, Trace
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array

REMOVED_LAG = np.int64(-(2**61))
"""The lag of a removed edge, which constrains nothing. A point without another incoming edge needs a ``start`` in
`compute_times`."""


def compute_times(graph: Graph, lag: Int64Array | None = None, start: Int64Array | None = None) -> Int64Array:
    """Return the time of each point of a graph, int64 ns, after a change of edge lags or start times.

    Args:
        lag: per edge (m), ns; default: as recorded. A removed edge has the lag `REMOVED_LAG`.
        start: per point (n), ns, of which only those of the sources are read; default: as recorded.

    Raises:
        ValueError: an array has a wrong length.
    """
    time = np.array(graph.time if start is None else start, dtype=np.int64)
    lag = graph.lag if lag is None else np.ascontiguousarray(lag, dtype=np.int64)
    _native.schedule(graph.first, graph.source, lag, time)
    return time


def compute_makespan(graph: Graph, time: Int64Array | None = None) -> int:
    """Return the time from the earliest to the latest point of a graph, ns; 0 for an empty graph.

    ``time``: default: as recorded.
    """
    time = graph.time if time is None else time
    return int(time.max() - time.min()) if len(time) else 0


def find_longest_path(
    graph: Graph, end: int | None = None, time: Int64Array | None = None, lag: Int64Array | None = None
) -> Int32Array:
    """Return the edges of the longest (zero-slack) path to the point ``end``; default: the latest point.

    In order of time; their lags and the time of the source sum to the time of ``end``. If several edges bind a point,
    the one from the latest source is taken, then the highest `EdgeKind`: the nearest and most specific reason.
    """
    if not len(graph):
        return np.zeros(0, np.int32)
    # At the recorded times, the edges with unexplained delay are those that bind among minimum latencies.
    lag = _default_lags(graph, time) if lag is None else np.ascontiguousarray(lag, dtype=np.int64)
    time = graph.time if time is None else time
    last = end if end is not None else int(np.argmax(time))
    path: Int32Array = _native.walk_back(graph.first, graph.source, lag, lag, time, graph.kind, last)
    return path


def _default_lags(graph: Graph, time: Int64Array | None) -> Int64Array:
    """Return the edge lags for path and slack searches; minimum latencies if ``time`` is None (recorded times)."""
    return graph.min_latency if time is None else graph.lag


def compute_slack(
    graph: Graph,
    ends: ArrayLike | None = None,
    time: Int64Array | None = None,
    lag: Int64Array | None = None,
) -> Int64Array:
    """Return the slack of each point, int64 ns: how much later the point could be without increasing the makespan.

    Args:
        ends: points that must not come later (default: no point may come after the last one).
        time: times of the points (default: as recorded).
        lag: lags of the edges (default: as recorded).
    """
    recorded = graph.time if time is None and lag is None else None
    lag = _default_lags(graph, time) if lag is None else np.ascontiguousarray(lag, dtype=np.int64)
    time = graph.time if time is None else time
    bound = np.full(len(graph), time.max() if len(time) else 0, np.int64)
    if ends is not None:
        # Far away, yet no lag subtracted from it overflows.
        bound[:] = np.iinfo(np.int64).max // 2
        bound[np.asarray(ends)] = time[np.asarray(ends)]
    _native.latest(graph.first, graph.source, lag, recorded, bound)
    bound -= time
    return bound


def mark_reachable(graph: Graph, points: ArrayLike, *, backward: bool = False) -> NDArray[np.bool_]:
    """Return a mask of ``points`` and all points reachable from them along edges (``backward``: against edges)."""
    reachable = np.zeros(len(graph), np.uint8)
    reachable[np.asarray(points)] = 1
    _native.reach(graph.first, graph.source, reachable, backward)
    return reachable.view(np.bool_)


# Select edges of a dependency graph by the kernel type of their event, or because they transfer data between ranks.

Mask = NDArray[np.bool_]

DURATION_KINDS = (EdgeKind.KERNEL, EdgeKind.COMPLETE)
TRANSFER_KINDS = (EdgeKind.TRANSFER, EdgeKind.MESSAGE)


def mask_transfers(graph: Graph, job: Job) -> Mask:
    """Return a mask of the edges that transfer data between ranks: in collectives, messages, communication kernels."""
    is_duration = np.isin(graph.kind, DURATION_KINDS)
    owned = mask_owned_edges(graph, job, "communication", is_duration)
    return np.asarray(owned | np.isin(graph.kind, TRANSFER_KINDS))


def mask_owned_edges(graph: Graph, job: Job, kind: str, among: Mask | None = None) -> Mask:
    """Return a mask of the edges whose event is of type ``kind`` (see `mask_events`), limited to the mask ``among``."""
    selected = np.zeros(len(graph.source), bool)
    for rank, edges in edges_by_rank(graph, job):
        edges = edges if among is None else edges[among[edges]]
        trace = job[rank]
        rows = owner_rows(graph, trace.events, edges)
        selected[edges[rows >= 0]] = mask_events(trace, kind)[rows[rows >= 0]]
    return selected


def mask_events(trace: Trace, kind: str) -> Mask:
    """Return a mask of the events of type ``kind``: a kernel type (such as "communication") or "python".

    Communication includes that of a backend on the host.
    """
    events = trace.events
    if kind == "python":
        return categories.mask_events(events, categories.PYTHON_CATEGORIES)
    kernel_types = categories.add_kernel_type(events.select("cat", "name"))["kind"]
    is_selected: Mask = (kernel_types == kind).fill_null(False).to_numpy()
    if kind == "communication":
        is_selected = is_selected | categories.match_names(events, categories.BACKEND_RANGE)
    return is_selected


def edges_by_rank(graph: Graph, job: Job) -> Iterator[tuple[int, Int64Array]]:
    """Yield (rank, indices of the rank's edges) for each rank of the job."""
    ranks, edges = graph.edges_of_ranks
    for rank in job:
        position = np.searchsorted(ranks, rank)
        has_edges = position < len(ranks) and ranks[position] == rank
        yield rank, edges[position] if has_edges else np.zeros(0, np.int64)


def owner_rows(graph: Graph, events: pl.DataFrame, edges: Int64Array) -> NDArray[np.int32]:
    """Return for each edge the row number of its event in the events table of its rank, -1 for none."""
    return rows_of_ids(events, pl.Series(graph.owner[edges].view(np.uint32)))
