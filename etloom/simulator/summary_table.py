"""The figures of a prediction as a table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.core.trace import Trace
from etloom.graphs import algorithms
from etloom.graphs.graph import Graph
from etloom.simulator.engine import Simulated

SUMMARY_SCHEMA = {
    "scope": pl.String,
    "rank": pl.Int64,
    "step": pl.Int64,
    "before_ns": pl.Int64,
    "upper_bound_ns": pl.Int64,
    "lower_bound_ns": pl.Int64,
    "upper_bound_change_pct": pl.Float64,
    "lower_bound_change_pct": pl.Float64,
}


def summarize_simulation(simulated: Simulated) -> pl.DataFrame:
    """Return one row for the job, for each rank, and for each step of each rank.

    Times are from the first to the last point of its events: a step lasts until the device has finished everything that
    the step launched, which may be long after its annotation on the host ends (the ``dur_ns`` of the analysis steps).

    Returns:
        scope (job, rank or step), rank, step, before_ns (recorded), upper_bound_ns, lower_bound_ns, and the changes
        upper_bound_change_pct and lower_bound_change_pct.
    """
    graph = simulated.graph.graph
    rows = [_summary_row(simulated, "job", None, None, np.ones(len(graph), bool))]
    for rank in simulated.recorded_job:
        in_rank = graph.rank == rank
        if in_rank.any() and len(simulated.recorded_job) > 1:
            rows.append(_summary_row(simulated, "rank", rank, None, in_rank))
    for rank, trace in simulated.recorded_job.items():
        for step, points in _iterate_steps(trace, graph, rank):
            rows.append(_summary_row(simulated, "step", rank, step, points))
    return pl.DataFrame(rows, schema=SUMMARY_SCHEMA, orient="row")


def _summary_row(
    simulated: Simulated, scope: str, rank: int | None, step: int | None, points: np.ndarray
) -> list[object]:
    before, upper, lower = (
        algorithms.compute_makespan(simulated.graph.graph, time[points])
        for time in (simulated.recorded, simulated.upper_bound, simulated.lower_bound)
    )
    changes = [100 * (bound - before) / before if before else None for bound in (upper, lower)]
    return [scope, rank, step, before, upper, lower, *changes]


def _iterate_steps(trace: Trace, graph: Graph, rank: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (step, mask of all points of its events) for each step."""
    events = trace.events.select("id", "step").drop_nulls("step")
    in_rank = np.flatnonzero((graph.rank == rank) & (graph.event >= 0))
    row_steps = np.full(trace.events.height, -(2**62), np.int64)
    ids = trace.events["id"].to_numpy()
    row_steps[np.searchsorted(ids, events["id"].to_numpy())] = events["step"].to_numpy()
    point_steps = row_steps[np.searchsorted(ids, graph.event[in_rank])]
    for step in events["step"].unique().sort().to_list():
        points = np.zeros(len(graph), bool)
        points[in_rank[point_steps == step]] = True
        if points.sum() > 1:
            yield step, points
