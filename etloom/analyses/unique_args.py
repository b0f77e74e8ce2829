"""Operators by their arguments: which shapes and types they are called with, how often, at what cost.

A row is an operator with the shapes, types and (where recorded) values of its inputs, as JSON. self: without what it
calls. device: of the kernels launched in it or below it, null where the trace holds no device work.

operator: only operators of this name. top: how many rows, the costliest first. step: only this step.

Units: ns. Needs shapes: profile with record_shapes=True. Definition: TraceLens' ops_unique_args.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses._activity import answer, check_top, has_device_work, in_step, of_rank, require_linked
from etloom.analyses._operators import operators
from etloom.errors import AnalysisError
from etloom.stacks import row_of, taken
from etloom.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "name": pl.String,
    "shapes": pl.String,
    "types": pl.String,
    "values": pl.String,
    "count": pl.Int64,
    "self_ns": pl.Int64,
    "total_ns": pl.Int64,
    "device_ns": pl.Int64,
    "mean_device_ns": pl.Float64,
}


def analyze(
    trace: Trace, *, operator: str | None = None, top: int = 50, step: int | None = None
) -> pl.DataFrame:
    check_top(top)
    require_linked(trace)
    arguments = trace.arguments.select(id="event", shapes="dims", types="types", values="concrete_inputs")
    calls = operators(trace) if arguments.height else arguments
    if not calls.height or not arguments.height:
        raise AnalysisError(
            "the trace holds no operators with shapes",
            where=of_rank(trace),
            remedy="profile with record_shapes=True",
        )
    calls = in_step(trace, calls, step)
    calls = calls.hstack(taken(arguments.drop("id"), row_of(arguments, calls["id"])))
    calls = calls if operator is None else calls.filter(pl.col("name") == operator)
    table = calls.group_by("name", "shapes", "types", "values").agg(
        pl.len().alias("count"),
        pl.col("self_ns").sum(),
        pl.col("dur").sum().alias("total_ns"),
        pl.col("device_ns").sum(),
        pl.col("device_ns").mean().alias("mean_device_ns"),
    )
    worst = "device_ns"
    if not has_device_work(trace):
        worst = "self_ns"
        table = table.with_columns(device_ns=None, mean_device_ns=None)
    table = answer(table, COLUMNS)
    keys = (worst, "name", "shapes", "types", "values")
    return table.sort(keys, descending=(True, False, False, False, False)).head(top)
