"""Kernels, memcpys and memsets by name or by type: count, durations, and share of the total.

total_ns is the sum of durations, so concurrent activities are each counted in full; see kernel-overlap for what ran at
the same time. std is that of a sample (n - 1), null for a single activity. total_pct is relative to the sum of all
rows. Sorted by total time, longest first.

If the trace has no GPU activity (basis "host"), a row is an operator or a backend's range of a collective
(gloo:all_reduce), and its duration is its self time, excluding nested events.

Units: ns (mean and std rounded to integers), percent. Definition: the second table of
HolisticTraceAnalysis get_gpu_kernel_breakdown, which is wrong if there are more names than it lists.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import LaunchStep, check_top, conform_columns, filter_step, percent_of_total
from etloom.analyses.helpers.operator_times import add_self_time
from etloom.core.errors import UnknownName
from etloom.core.trace import Trace
from etloom.timeline.activity import select_device_events, select_host_calls

SCOPE = "rank"
COLUMNS = {
    "kind": pl.String,
    "name": pl.String,
    "basis": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "std_ns": pl.Int64,
    "min_ns": pl.Int64,
    "max_ns": pl.Int64,
    "total_pct": pl.Float64,
}


def analyze(
    trace: Trace,
    *,
    by: Annotated[
        str,
        "name (one row per name, with its type in kind) or kind (one row per type: computation, "
        "communication, memory, other).",
    ] = "name",
    step: LaunchStep = None,
    top: Annotated[
        int | None, "Number of rows, longest total first (default: all). Shares remain relative to all rows."
    ] = None,
) -> pl.DataFrame:
    if by not in ("name", "kind"):
        raise UnknownName("grouping", by, ("name", "kind"), option="by")
    check_top(1 if top is None else top)
    work, basis = select_device_events(trace, "kind", "name", "step", "dur"), "device"
    if not work.height:
        work, basis = add_self_time(trace, select_host_calls(trace)).with_columns(dur="self_ns"), "host"
    dur = pl.col("dur")
    table = (
        filter_step(trace, work, step)
        .group_by(["kind", "name"] if by == "name" else ["kind"])
        .agg(
            pl.len().alias("count"),
            dur.sum().alias("total_ns"),
            dur.mean().round().alias("mean_ns"),
            dur.std().round().alias("std_ns"),
            dur.min().alias("min_ns"),
            dur.max().alias("max_ns"),
        )
        .with_columns(
            pl.lit(basis).alias("basis"),
            percent_of_total("total_ns"),
            *([] if by == "name" else [pl.lit(None, dtype=pl.String).alias("name")]),
        )
    )
    table = conform_columns(table, COLUMNS).sort("total_ns", "kind", "name", descending=[True, False, False])
    return table if top is None else table.head(top)
