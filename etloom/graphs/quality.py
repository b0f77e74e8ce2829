"""How far a graph explains a recording: the figures to read before believing what it predicts.

That a graph with its excess gives the recorded times says nothing about it. What does: how well the floors alone
give them, and how often device work starts just when the graph says it could, against how often it would seem to by
chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom import _native
from etloom.core.arrays import to_array
from etloom.core.trace import Job, Trace
from etloom.graphs import algorithms
from etloom.graphs.algorithms import EdgeKind, Graph, Int64Array
from etloom.graphs.event_arrays import Mask, rows_of_ids

SOON_NS = 5_000
"""Work that starts so long after what it waited for is explained."""

SHIFTS_NS = (23_000, 37_000, -17_000)
"""Starts moved by these are explained by chance alone."""

MIN_STARTS = 20
"""Fewer starts of device work than this say nothing of a recording."""

MIN_EXPLAINED_SHARE = 0.8
"""Of device starts, below which a graph does not explain the recording: a sampled trace reaches about 0.4."""


@dataclass(frozen=True)
class ExplainedStarts:
    """Of the starts of device work in one rank: how many there are, and the shares (0 to 1) that an edge explains,
    that edges of two sorts do (ambiguous), and that would be explained after each shift (by default `SHIFTS_NS`).
    ``residual``: as of `Fit`."""

    starts: int
    share: float
    ambiguous: float
    by_chance: tuple[float, ...]
    residual: int


def measure_explained_starts(
    graph: Graph, trace: Trace, rank: int, shifts: Sequence[int] = SHIFTS_NS
) -> ExplainedStarts:
    """Work starts within SOON_NS of the end of what its stream did or waited for, or between the start of its launch
    call and SOON_NS after its end, or while what its stream did still runs. shifts: by how much starts are moved to
    see how many would be explained by chance."""
    own = graph.rank == rank
    launch = np.flatnonzero(graph.kind == EdgeKind.LAUNCH)
    called = graph.source[launch]
    mine = own[called]
    row = rows_of_ids(trace.events, pl.Series(graph.event[called[mine]]))
    call, back = np.zeros((2, len(launch)), np.int64)
    call[mine] = to_array(trace.events["ts"].gather(row), 0)
    back[mine] = call[mine] + to_array(trace.events["dur"].gather(row), 0)
    starts, some, both, by_chance, residual = _native.explained_starts(
        *(graph.first, graph.source, graph.time, graph.floor, graph.kind, own, call, back),
        *(EdgeKind.KERNEL, EdgeKind.LAUNCH, EdgeKind.OVERLAP, SOON_NS, shifts),
    )
    if not starts:
        return ExplainedStarts(0, 1.0, 0.0, (0.0,) * len(shifts), residual)
    chance = tuple(count / starts for count in by_chance)
    return ExplainedStarts(starts, some / starts, both / starts, chance, residual)


@dataclass(frozen=True)
class LatencyFit:
    """Of one rank or of all: how far the floors alone give the recorded times.

    ``makespan``, ``shortfall`` (recorded less by floors, of the last point), ``latest`` (of the point that falls
    short most), ``residual`` (sum over the points of what nothing explains), all ns.
    """

    points: int
    edges: int
    makespan: int
    shortfall: int
    latest: int
    residual: int


def measure_fits(graph: Graph, ranks: list[int]) -> dict[int | None, LatencyFit]:
    """The fit of each rank, and under None of all."""
    floors = algorithms.compute_times(graph, graph.floor)
    whole = _measure_fit(graph.time, floors, len(graph.source), sum_residuals(graph))
    if len(ranks) == 1:
        return {ranks[0]: whole, None: whole}
    degree = np.diff(graph.first)
    found: dict[int | None, LatencyFit] = {}
    for rank in ranks:
        own = graph.rank == rank
        found[rank] = _measure_fit(
            graph.time[own], floors[own], int(degree[own].sum()), sum_residuals(graph, own)
        )
    return found | {None: whole}


def _measure_fit(time: Int64Array, by_floors: Int64Array, edges: int, residual: int) -> LatencyFit:
    """The fit of points, of the edges into them: as recorded, and as floors alone have them."""
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


def sum_residuals(graph: Graph, own: Mask | None = None) -> int:
    """The sum of `Graph.residual` over all points or these."""
    return int(_native.residual_sum(graph.first, graph.source, graph.time, graph.floor, own))


def explain_misfit(found: ExplainedStarts, makespan: int, residual: int) -> str | None:
    """Why a rank's recording is not explained; None where it is. makespan and residual as of `Fit`."""
    if found.starts and found.starts < MIN_STARTS:
        return f"only {found.starts} starts of device work"
    if found.share < MIN_EXPLAINED_SHARE:
        return f"{100 * (1 - found.share):.0f} % of the starts of device work are unexplained"
    if makespan and residual > makespan / 2:
        return f"unexplained delays sum to {100 * residual / makespan:.0f} % of the makespan"
    return None


def find_unexplained_ranks(graph: Graph, job: Job) -> dict[int, str]:
    """Rank -> why its recording is not explained, of those that are not: what follows from the graph is no more there
    than a chain of what came after what."""
    found: dict[int, str] = {}
    for rank, trace in job.items():
        time = graph.time if len(job) == 1 else graph.time[graph.rank == rank]
        if len(time):
            seen = measure_explained_starts(graph, trace, rank, shifts=())
            why = explain_misfit(seen, algorithms.compute_makespan(graph, time), seen.residual)
            found |= {rank: why} if why is not None else {}
    return found
