"""Measure how well a dependency graph explains a recording, to check before trusting its predictions.

A graph that includes unexplained delays always reproduces the recorded times, which proves nothing. Two figures are
meaningful: how well the minimum latencies alone reproduce the times, and how often GPU activities start at the moment
that the graph predicts, compared with how often they would by chance.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom import _native
from etloom.core.arrays import to_array
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph, Int64Array
from etloom.linker.sync_dependencies import list_waiting_calls
from etloom.timeline.activity import select_device_events, to_intervals

SOON_NS = 5_000
"""A start up to this long after its cause counts as explained."""

SHIFTS_NS = (23_000, 37_000, -17_000)
"""Starts shifted by these times are explained by chance only."""

MIN_STARTS = 20
"""Fewer starts of GPU activities are not meaningful."""

MIN_EXPLAINED_SHARE = 0.8
"""Share of starts below which a graph does not explain the recording; a sampled trace reaches about 0.4."""

MAX_UNEXPLAINED_WAIT_SHARE = 0.05
"""If unexplained waits for the GPU take a larger share of the makespan, the recording counts as not explained."""


@dataclass(frozen=True)
class ExplainedStarts:
    """Number and share of the GPU activity starts of a rank that the graph explains.

    Shares are from 0 to 1: ``share`` that an edge explains, ``ambiguous`` that edges of two kinds explain,
    ``by_chance`` that would be explained after each shift in time (default: `SHIFTS_NS`). ``residual``: see
    `LatencyFit`.
    """

    starts: int
    share: float
    ambiguous: float
    by_chance: tuple[float, ...]
    residual: int


def measure_explained_starts(
    graph: Graph, trace: Trace, rank: int, shifts: Sequence[int] = SHIFTS_NS
) -> ExplainedStarts:
    """Measure the share of GPU activity starts that the graph explains by an edge.

    A start is explained if it is within SOON_NS of the end of the previous activity of its stream or of what the
    stream waited for, between the start of its launch call and SOON_NS after the end of that call, or while the
    previous activity of its stream still runs.

    Args:
        shifts: times in ns by which starts are shifted to measure how many are explained by chance.
    """
    in_rank = graph.rank == rank
    launch = np.flatnonzero(graph.kind == EdgeKind.LAUNCH)
    called = graph.source[launch]
    in_this_rank = in_rank[called]
    row = rows_of_ids(trace.events, pl.Series(graph.event[called[in_this_rank]]))
    call, return_time = np.zeros((2, len(launch)), np.int64)
    call[in_this_rank] = to_array(trace.events["ts"].gather(row), 0)
    return_time[in_this_rank] = call[in_this_rank] + to_array(trace.events["dur"].gather(row), 0)
    starts, explained_count, ambiguous_count, chance_counts, residual = _native.explained_starts(
        *(graph.first, graph.source, graph.time, graph.min_latency, graph.kind, in_rank, call, return_time),
        *(EdgeKind.KERNEL, EdgeKind.LAUNCH, EdgeKind.OVERLAP, SOON_NS, shifts),
    )
    if not starts:
        return ExplainedStarts(0, 1.0, 0.0, (0.0,) * len(shifts), residual)
    by_chance = tuple(count / starts for count in chance_counts)
    return ExplainedStarts(starts, explained_count / starts, ambiguous_count / starts, by_chance, residual)


def measure_unexplained_waits(graph: Graph, trace: Trace, rank: int) -> int:
    """Return the time (ns) that the graph counts as host work although a host call waits for the busy GPU."""
    calls = list_waiting_calls(trace)
    if not len(calls):
        return 0
    table = np.zeros(
        int(calls.to_numpy().max()) + 2, np.uint8
    )  # the last entry is for edges without an owner
    table[calls.to_numpy()] = 1
    is_owned = _native.looked_up(table, graph.owner.view(np.uint32), clip=True).view(np.bool_)
    work = np.flatnonzero(is_owned & (graph.kind == EdgeKind.SEGMENT))
    target = np.searchsorted(graph.first, work, side="right") - 1
    in_rank = graph.rank[target] == rank
    work, target = work[in_rank], target[in_rank]
    busy = to_intervals(select_device_events(trace, "ts", "dur"))
    return int(busy.covered(graph.time[graph.source[work]], graph.time[target]).sum())


@dataclass(frozen=True)
class LatencyFit:
    """Error of the times that minimum latencies predict, against the recorded times, for one rank or all ranks.

    All in ns: ``makespan``; ``shortfall`` of the last point (recorded minus computed); ``latest``, the largest
    shortfall of a point; ``residual``, the sum of unexplained delays over the points.
    """

    points: int
    edges: int
    makespan: int
    shortfall: int
    latest: int
    residual: int


def measure_fit_by_rank(graph: Graph, ranks: list[int]) -> dict[int | None, LatencyFit]:
    """Return the `LatencyFit` of each rank, and of all ranks under the key None."""
    computed = algorithms.compute_times(graph, graph.min_latency)
    total = _measure_fit(graph.time, computed, len(graph.source), sum_residuals(graph))
    if len(ranks) == 1:
        return {ranks[0]: total, None: total}
    residual, degree = graph.residual, np.diff(graph.first)
    points_of_ranks = dict(graph.group_points())
    by_rank: dict[int | None, LatencyFit] = {}
    for rank in ranks:
        points = points_of_ranks.get(rank, np.zeros(0, np.int64))
        by_rank[rank] = _measure_fit(
            graph.time[points], computed[points], int(degree[points].sum()), int(residual[points].sum())
        )
    return by_rank | {None: total}


def _measure_fit(time: Int64Array, by_floors: Int64Array, edges: int, residual: int) -> LatencyFit:
    """Compare recorded point times with those that minimum latencies predict (``by_floors``), as a `LatencyFit`."""
    if not len(time):
        return LatencyFit(0, 0, 0, 0, 0, 0)
    return LatencyFit(
        len(time),
        edges,
        int(time.max() - time.min()),
        int(time.max() - by_floors.max()),
        int((time - by_floors).max()),
        residual,
    )


def sum_residuals(graph: Graph) -> int:
    """Return the sum of the unexplained delays (`Graph.residual`) over all points, ns."""
    return int(_native.residual_sum(graph.first, graph.source, graph.time, graph.min_latency))


@dataclass(frozen=True)
class Misfit:
    """Why the graph does not explain a rank's recording.

    ``error``: the share (from 0) of kernel starts or of time that the graph places wrongly; 0 if it is unknown, or if
    the bounds of what-ifs contain it, as they contain unexplained delays.
    """

    reason: str
    error: float = 0.0


def explain_misfit(
    explained: ExplainedStarts, makespan: int, residual: int, unexplained_waits: int
) -> Misfit | None:
    """Return why the graph does not explain a rank's recording, by the largest error; None if it does.

    See `LatencyFit` for the times, and `measure_unexplained_waits`.
    """
    misfits = []
    if explained.starts and explained.starts < MIN_STARTS:
        misfits.append(Misfit(f"only {explained.starts} kernel starts"))
    elif explained.share < MIN_EXPLAINED_SHARE:
        share = 1 - explained.share
        misfits.append(Misfit(f"{100 * share:.0f} % of the kernel starts are unexplained", share))
    if makespan and residual > makespan / 2:
        share = residual / makespan
        misfits.append(Misfit(f"unexplained delays sum to {100 * share:.0f} % of the makespan"))
    if unexplained_waits > MAX_UNEXPLAINED_WAIT_SHARE * makespan:
        share = unexplained_waits / makespan
        reason = f"calls that wait for the GPU count as host work for {100 * share:.0f} % of the makespan"
        misfits.append(Misfit(reason, share))
    return max(misfits, key=lambda misfit: misfit.error, default=None)


def find_unexplained_ranks(graph: Graph, job: Job) -> dict[int, Misfit]:
    """Return the ranks whose recording the graph does not explain, with the reason.

    The graph of such a rank states little more than the order of its events.
    """
    # Several analyses ask; the job does not keep the graph.
    return dict(job.compute_once(_find_unexplained_ranks, weakref.ref(graph)))


def _find_unexplained_ranks(job: Job, reference: weakref.ref[Graph]) -> dict[int, Misfit]:
    graph = reference()
    assert graph is not None
    misfits: dict[int, Misfit] = {}
    for rank, part in graph.split_by_rank(job.ranks):
        time = part.time if len(job) == 1 else part.time[part.rank == rank]
        if len(time):
            explained = measure_explained_starts(part, job[rank], rank, shifts=())
            waits = measure_unexplained_waits(part, job[rank], rank)
            makespan = algorithms.compute_makespan(part, time)
            misfit = explain_misfit(explained, makespan, explained.residual, waits)
            misfits |= {rank: misfit} if misfit is not None else {}
    return misfits
