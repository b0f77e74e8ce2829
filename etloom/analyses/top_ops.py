"""Operators by the time they take: calls, own, self and total time, and the device time they cause.

A row is an operator of the host. total: from its start to its end, where an operator that calls itself counts once.
self: without what it calls, be it another operator, a call into the device's runtime, a Python frame or a range.
runtime: in calls into the device's runtime or driver (cudaMemcpyAsync, cudaLaunchKernel) of which it is the innermost
operator: where a host waits for its device, it waits in one; null where none were recorded. own: self and runtime
together. mean: of all calls. device: the sum of the durations of the kernels, copies and sets that were launched in it
or in what it calls; null where the trace holds no device work. own_pct and self_pct are of the own and the self time of
all operators.

top: how many rows, the greatest first.

by: what decides: own, self, runtime, total, mean, count or device.

step: only the operators of this step.

Units: ns (mean rounded to whole ones), percent. Definition: as torch.profiler's key_averages (self is its self CPU
time, of which runtime calls are no part: they have rows there), which counts an operator inside one of the same name
twice.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import check_top, conform_columns, filter_step, percent_of_all, require_linked
from etloom.analyses.helpers.operator_times import measure_operators
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, explain_missing_times, has_device_events

SCOPE = "rank"
COLUMNS = {
    "name": pl.String,
    "count": pl.Int64,
    "own_ns": pl.Int64,
    "own_pct": pl.Float64,
    "self_ns": pl.Int64,
    "self_pct": pl.Float64,
    "runtime_ns": pl.Int64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "device_ns": pl.Int64,
}
_ORDERS = {name: f"{name}_ns" for name in ("own", "self", "runtime", "total", "mean", "device")} | {
    "count": "count"
}


def analyze(trace: Trace, *, top: int = 20, by: str = "own", step: int | None = None) -> pl.DataFrame:
    if by not in _ORDERS:
        raise UnknownName("order", by, _ORDERS, option="by")
    check_top(top)
    require_linked(trace)
    calls = measure_operators(trace)
    if not calls.height:
        raise explain_missing_times(trace) or AnalysisError(
            "the trace holds no operators",
            where=describe_rank(trace),
            remedy="kernel-breakdown tells of its kernels",
        )
    outermost = pl.col("outermost")
    table = (
        filter_step(trace, calls, step)
        .group_by("name")
        .agg(
            pl.len().alias("count"),
            pl.col("own_ns", "self_ns").sum(),
            # Of a trace without calls each is null, and so is the sum.
            pl.when(pl.col("runtime_ns").is_not_null().any()).then(pl.col("runtime_ns").sum()),
            pl.col("dur").filter(outermost).sum().alias("total_ns"),
            pl.col("dur").mean().round().alias("mean_ns"),
            pl.col("device_ns").filter(outermost).sum(),
        )
        .with_columns(percent_of_all("own_ns"), percent_of_all("self_ns"))
    )
    if not has_device_events(trace):
        table = table.with_columns(pl.lit(None, dtype=pl.Int64).alias("device_ns"))
    return (
        conform_columns(table, COLUMNS)
        .sort(_ORDERS[by], "name", descending=[True, False], nulls_last=True)
        .head(top)
    )
