"""Select edges of a dependency graph by the kernel type of their event, or because they transfer data between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.trace import Job, Trace
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph, Int64Array

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
