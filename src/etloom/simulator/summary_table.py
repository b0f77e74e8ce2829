"""Builds the table of a simulation: recorded and predicted durations of the job, its ranks and its steps."""

from __future__ import annotations

import polars as pl

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
    """Return recorded and predicted durations: one row for the job, each rank, and each step of each rank.

    Times are from the first to the last point of its events: a step lasts until the device has finished everything that
    the step launched, which may be long after its annotation on the host ends (the ``dur_ns`` of the analysis steps).

    Returns:
        scope (job, rank or step), rank, step, before_ns (recorded), upper_bound_ns, lower_bound_ns, and the changes
        upper_bound_change_pct and lower_bound_change_pct.
    """
    recording, bounds = simulated.recording, (simulated.upper_times, simulated.lower_times)
    makespans = [simulated.graph.makespan(time) for time in (recording.contraction.recorded_times, *bounds)]
    rows = [_summary_row("job", None, None, makespans)]
    tables = []
    for groups, recorded in zip(recording.spans, recording.recorded_spans, strict=True):
        measured = zip(recorded, *(groups.measure(time).tolist() for time in bounds), strict=True)
        tables.append(zip(groups.keys, map(list, measured), strict=True))
    by_rank, by_step = tables
    if len(simulated.recorded_job) > 1:
        rows += [_summary_row("rank", rank, None, spans) for (rank,), spans in by_rank]
    rows += [_summary_row("step", rank, step, spans) for (rank, step), spans in by_step]
    return pl.DataFrame(rows, schema=SUMMARY_SCHEMA, orient="row")


def _summary_row(scope: str, rank: int | None, step: int | None, spans: list[int]) -> list[object]:
    before, *bounds = spans
    # Delays that may disappear with their cause grow with it where a change lengthens it.
    upper, lower = max(bounds), min(bounds)
    changes = [100 * (bound - before) / before if before else None for bound in (upper, lower)]
    return [scope, rank, step, before, upper, lower, *changes]
