"""Launch calls by name: call durations, launch delays, and short activities.

One row per call such as cudaLaunchKernel, most frequent first. launches is the number of calls, activities the number
of kernels, memcpys and memsets they launched (more than one per graph launch). launch_delay: from the end of the call
to the start of its first activity, 0 if that began earlier. short_activities: activities of calls whose activities
together took less time than the call itself, so that the device waits for the host; the kernels of a graph are compared
with the one call that launched them. slow_calls: calls longer than call_cutoff. late_activities: launches whose first
activity began more than delay_cutoff after the call.

Units: ns (mean rounded to integers). Definition: HolisticTraceAnalysis get_cuda_kernel_launch_stats, which only plots
its cutoffs (50 and 100 µs), and does not support calls with several activities.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import LaunchStep, conform_columns
from etloom.analyses.launches import join_calls_and_work
from etloom.core.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "call": pl.String,
    "launches": pl.Int64,
    "activities": pl.Int64,
    "call_total_ns": pl.Int64,
    "call_mean_ns": pl.Int64,
    "call_max_ns": pl.Int64,
    "launch_delay_mean_ns": pl.Int64,
    "launch_delay_median_ns": pl.Int64,
    "launch_delay_max_ns": pl.Int64,
    "short_activities": pl.Int64,
    "slow_calls": pl.Int64,
    "late_activities": pl.Int64,
}


def analyze(
    trace: Trace,
    *,
    call_cutoff: Annotated[int, "Duration in ns above which a call is slow."] = 50_000,
    delay_cutoff: Annotated[int, "Delay in ns above which an activity is late."] = 100_000,
    step: LaunchStep = None,
) -> pl.DataFrame:
    works = join_calls_and_work(trace, step)
    calls = works.unique("launch", keep="first", maintain_order=True)
    call, delay = pl.col("call_ns"), pl.col("launch_delay_ns")
    table = calls.group_by("call").agg(
        pl.len().alias("launches"),
        call.sum().alias("call_total_ns"),
        call.mean().round().alias("call_mean_ns"),
        call.max().alias("call_max_ns"),
        delay.mean().round().alias("launch_delay_mean_ns"),
        delay.median().round().alias("launch_delay_median_ns"),
        delay.max().alias("launch_delay_max_ns"),
        (call > call_cutoff).sum().alias("slow_calls"),
        (delay > delay_cutoff).sum().alias("late_activities"),
    )
    is_short = pl.col("device_ns").sum().over("launch") < call
    short = (
        works.with_columns(is_short.alias("short"))
        .group_by("call")
        .agg(pl.len().alias("activities"), pl.col("short").sum().alias("short_activities"))
    )
    return conform_columns(table.join(short, on="call"), COLUMNS).sort(
        "launches", "call", descending=[True, False]
    )
