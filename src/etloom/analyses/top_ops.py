"""Operators by time: calls, exclusive, self and total host time, and the device time they launch.

One row per host operator. total_ns: from start to end; recursive calls are counted once. self_ns: excluding callees:
other operators, calls of the device runtime, Python frames and ranges. runtime_ns: time in calls of the device runtime
or driver (cudaMemcpyAsync, cudaLaunchKernel) of which it is the innermost operator, including time blocked on the
device; null if no such calls were recorded. exclusive_ns: self_ns + runtime_ns. mean_ns: mean duration of all count
calls, also of those nested in a call of the same name, whose time total_ns counts once: for recursive operators it is
more than total_ns / count. device_ns: sum of the durations of the kernels, memcpys and memsets launched by it or its
callees; null if the trace has no GPU activity. exclusive_pct and self_pct are relative to the exclusive and the self
time of all operators. replayed: calls within replays of device graphs; they count for device_ns, but take no time on
the host.

Units: ns (mean rounded to integers), percent. Definition: as torch.profiler's key_averages (self_ns is its self CPU
time, which excludes runtime calls: they have rows of their own there), which counts an operator nested in one of the
same name twice.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import check_top, conform_columns, filter_step, percent_of_total, require_linked
from etloom.analyses.helpers.operator_times import measure_operators, measure_replayed_operators
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, explain_missing_times, has_device_events

SCOPE = "rank"
COLUMNS = {
    "name": pl.String,
    "count": pl.Int64,
    "exclusive_ns": pl.Int64,
    "exclusive_pct": pl.Float64,
    "self_ns": pl.Int64,
    "self_pct": pl.Float64,
    "runtime_ns": pl.Int64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "device_ns": pl.Int64,
    "replayed": pl.Int64,
}
_SORT_COLUMNS = {
    name: f"{name}_ns" for name in ("exclusive", "self", "runtime", "total", "mean", "device")
} | {"count": "count"}


def analyze(
    trace: Trace,
    *,
    top: Annotated[int, "Number of rows, largest first."] = 20,
    by: Annotated[str, "Sort key: exclusive, self, runtime, total, mean, count or device."] = "exclusive",
    step: Annotated[int | None, "Only operators in this step."] = None,
) -> pl.DataFrame:
    if by not in _SORT_COLUMNS:
        raise UnknownName("order", by, _SORT_COLUMNS, option="by")
    check_top(top)
    require_linked(trace)
    table = trace.compute_once(_sum_by_name, step)
    return table.sort(_SORT_COLUMNS[by], "name", descending=[True, False], nulls_last=True).head(top)


def _sum_by_name(trace: Trace, step: int | None) -> pl.DataFrame:
    """Return counts and times of all operators, summed by name, in no order; raise AnalysisError if there are no
    operators."""
    calls, replayed = measure_operators(trace), measure_replayed_operators(trace)
    if not calls.height and not replayed.height:
        raise explain_missing_times(trace) or AnalysisError(
            "the trace contains no operators",
            where=describe_rank(trace),
            remedy="see kernel-breakdown for its kernels",
        )
    outermost = pl.col("outermost")
    table = (
        filter_step(trace, calls, step)
        .group_by("name")
        .agg(
            pl.len().alias("count"),
            pl.col("exclusive_ns", "self_ns").sum(),
            # Null for all operators, and therefore for the sum, if no runtime calls were recorded.
            pl.when(pl.col("runtime_ns").is_not_null().any()).then(pl.col("runtime_ns").sum()),
            pl.col("dur").filter(outermost).sum().alias("total_ns"),
            pl.col("dur").mean().round().alias("mean_ns"),
            pl.col("device_ns").filter(outermost).sum(),
        )
        .with_columns(percent_of_total("exclusive_ns"), percent_of_total("self_ns"))
    )
    table = _add_replayed(table, filter_step(trace, replayed, step))
    if not has_device_events(trace):
        table = table.with_columns(pl.lit(None, dtype=pl.Int64).alias("device_ns"))
    return conform_columns(table, COLUMNS)


def _add_replayed(table: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Add the number and device time of operator calls in device graph replays to the sums by operator name."""
    if calls.is_empty():
        return table.with_columns(pl.lit(0, pl.Int64).alias("replayed"))
    sums = calls.group_by("name").agg(
        pl.len().cast(pl.Int64).alias("replayed"),
        pl.col("device_ns").filter(pl.col("outermost")).sum().alias("replayed_ns"),
    )
    zeros = ("count", "exclusive_ns", "self_ns", "total_ns", "device_ns", "replayed", "replayed_ns")
    return (
        table.join(sums, on="name", how="full", coalesce=True)
        .with_columns(pl.col(zeros).fill_null(0))
        .with_columns(pl.col("device_ns") + pl.col("replayed_ns"))
    )
