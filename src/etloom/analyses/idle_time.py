"""Idle time of each stream by cause (waiting for the host, for earlier kernels, other), per step and in total.

A gap is the time on a stream between the end of all earlier activities and the start of the next one. It belongs to the
activity after it, and to the step in which that was launched. Its cause:

- host_wait: the call that launched the next activity began after the stream had become idle
- kernel_wait: the gap is shorter than consecutive_kernel_delay, and the activity was launched in time or its launch was
  not recorded
- other: a longer gap before such an activity (a wait for another stream or for resources)

One row per stream and cause, for each step and (null step) in total. busy_ns is the time in which the stream ran, and
busy + the idle time of all causes = span_ns: in total, from the first start to the last end; per step, including the
gap before its first activity. idle_pct is the share of the stream's idle time, span_pct of its span; null if that is 0.

Units: ns (mean, median and std rounded to integers; std of a sample), percent. Definition: HolisticTraceAnalysis
get_idle_time_breakdown, whose gaps are negative if activities of one stream overlap, and which documents its delay as
ns but uses us.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import Step, check_step, conform_columns
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "step": pl.Int64,
    "device": pl.Int64,
    "stream": pl.Int64,
    "cause": pl.String,
    "gaps": pl.Int64,
    "idle_ns": pl.Int64,
    "idle_pct": pl.Float64,
    "span_pct": pl.Float64,
    "busy_ns": pl.Int64,
    "span_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "std_ns": pl.Int64,
    "min_ns": pl.Int64,
    "median_ns": pl.Int64,
    "max_ns": pl.Int64,
}
_CAUSES = pl.Series("cause", ["host_wait", "kernel_wait", "other"])
_STREAM = ("step", "device", "stream")


def analyze(
    trace: Trace,
    *,
    consecutive_kernel_delay: Annotated[
        int, "Gaps shorter than this (in ns) are normal between kernels that were launched in time."
    ] = 30_000,
    step: Step = None,
) -> pl.DataFrame:
    work = select_launched_work(trace, "device", "stream", "step", "ts", "dur", "launch_ts")
    check_step(trace, step)
    gaps = _find_gaps(work, consecutive_kernel_delay)
    if step is None:
        in_steps = gaps.drop_nulls("step")
        gaps = pl.concat([in_steps, gaps.with_columns(step=pl.lit(None, pl.Int64))])
    else:
        gaps = gaps.filter(step=step)

    gap = pl.col("gap").filter(pl.col("gap") > 0)
    by_cause = gaps.group_by(*_STREAM, "cause").agg(
        gaps=gap.len(),
        idle_ns=gap.sum(),
        mean_ns=gap.mean().round(),
        std_ns=gap.std().round(),
        min_ns=gap.min(),
        median_ns=gap.median().round(),
        max_ns=gap.max(),
    )
    by_stream = gaps.group_by(_STREAM).agg(busy_ns=pl.col("busy").sum(), total_ns=pl.col("gap").sum())
    table = (
        by_stream.join(_CAUSES.to_frame(), how="cross")
        .join(by_cause, on=[*_STREAM, "cause"], how="left", nulls_equal=True)
        .with_columns(pl.col("gaps", "idle_ns").fill_null(0), span_ns=pl.col("busy_ns") + pl.col("total_ns"))
        .with_columns(
            idle_pct=100 * pl.col("idle_ns") / _if_positive("total_ns"),
            span_pct=100 * pl.col("idle_ns") / _if_positive("span_ns"),
        )
        .sort(*_STREAM, "cause", nulls_last=True)
    )
    return conform_columns(table, COLUMNS)


def _find_gaps(work: pl.DataFrame, consecutive_kernel_delay: int) -> pl.DataFrame:
    """Return, for each GPU activity, the gap before it on its stream, its cause, and the time in which only it ran.

    Returns:
        A row per activity. Columns: step, device, stream, gap and busy (ns), and cause.
    """
    end = pl.col("ts") + pl.col("dur")
    before = end.cum_max().shift().over("device", "stream")  # the end of all earlier activities of the stream
    work = work.with_columns(before=before.fill_null(pl.col("ts")))
    gap = (pl.col("ts") - pl.col("before")).clip(0)
    host_wait, kernel_wait, other = _CAUSES
    return work.select(
        *_STREAM,
        gap=gap,
        busy=(end - pl.max_horizontal("ts", "before")).clip(0),
        cause=pl.when(pl.col("launch_ts") > pl.col("before"))
        .then(pl.lit(host_wait))
        .when(gap < consecutive_kernel_delay)
        .then(pl.lit(kernel_wait))
        .otherwise(pl.lit(other)),
    )


def _if_positive(column: str) -> pl.Expr:
    return pl.when(pl.col(column) > 0).then(column)
