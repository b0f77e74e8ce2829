"""The calls that launch device work, by name: how long they took, how long the work then waited, and what was short.

A row is a call such as cudaLaunchKernel, the most frequent first. launches counts the calls and works the kernels,
copies and sets they launched (more than one where a call launches a graph). launch_delay: from the end of the call
to the start of the first work of it, 0 where that began sooner. short_works: the works of calls whose works together
took less time than the call, so that the device waits for the host; the kernels of a graph stand against the one call
that launched them all. slow_calls: calls that took longer than call_cutoff. late_works: launches whose work began later
than delay_cutoff after the call.

call_cutoff: ns above which a call is slow.

delay_cutoff: ns above which work is late.

step: only what was launched in this step.

Units: ns (mean rounded to whole ones). Definition: HolisticTraceAnalysis get_cuda_kernel_launch_stats, which draws
its cutoffs (50 and 100 us) only, and knows no calls of several works.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.analyses.launches import join_calls_and_work
from etloom.core.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "call": pl.String,
    "launches": pl.Int64,
    "works": pl.Int64,
    "call_total_ns": pl.Int64,
    "call_mean_ns": pl.Int64,
    "call_max_ns": pl.Int64,
    "launch_delay_mean_ns": pl.Int64,
    "launch_delay_median_ns": pl.Int64,
    "launch_delay_max_ns": pl.Int64,
    "short_works": pl.Int64,
    "slow_calls": pl.Int64,
    "late_works": pl.Int64,
}


def analyze(
    trace: Trace, *, call_cutoff: int = 50_000, delay_cutoff: int = 100_000, step: int | None = None
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
        (delay > delay_cutoff).sum().alias("late_works"),
    )
    is_short = pl.col("device_ns").sum().over("launch") < call
    short = (
        works.with_columns(is_short.alias("short"))
        .group_by("call")
        .agg(pl.len().alias("works"), pl.col("short").sum().alias("short_works"))
    )
    return conform_columns(table.join(short, on="call"), COLUMNS).sort(
        "launches", "call", descending=[True, False]
    )
