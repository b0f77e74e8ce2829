"""The figures of a prediction as a table."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.graphs.graph import Int64Array
from etloom.simulator.durations import PointSpans
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
    by_rank, by_step = simulated.recording.spans
    makespans = [simulated.graph.makespan(time) for time in _list_times(simulated)]
    rows = [_summary_row("job", None, None, makespans)]
    if len(simulated.recorded_job) > 1:
        rows += [
            _summary_row("rank", rank, None, spans)
            for (rank,), spans in zip(by_rank.keys, _measure(by_rank, simulated), strict=True)
        ]
    rows += [
        _summary_row("step", rank, step, spans)
        for (rank, step), spans in zip(by_step.keys, _measure(by_step, simulated), strict=True)
    ]
    return pl.DataFrame(rows, schema=SUMMARY_SCHEMA, orient="row")


def _list_times(simulated: Simulated) -> tuple[Int64Array, Int64Array, Int64Array]:
    return simulated.recorded, simulated.upper_bound, simulated.lower_bound


def _measure(groups: PointSpans, simulated: Simulated) -> list[list[int]]:
    """Return the recorded span of each group, its upper and its lower bound, ns."""
    spans: list[list[int]] = np.column_stack(list(map(groups.measure, _list_times(simulated)))).tolist()
    return spans


def _summary_row(scope: str, rank: int | None, step: int | None, spans: list[int]) -> list[object]:
    before, upper, lower = spans
    changes = [100 * (bound - before) / before if before else None for bound in (upper, lower)]
    return [scope, rank, step, before, upper, lower, *changes]
