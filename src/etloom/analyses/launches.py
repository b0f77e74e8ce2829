"""GPU activities with the call that launched each: durations and launch delay.

One row per kernel, memcpy or memset whose launch was recorded, in launch order. launch_delay_ns is the time from the
end of the call to the start of the activity, 0 if it began before the call returned. All launching calls are covered
(cudaLaunchKernel and its variants, hip*, cuLaunchKernel*, memcpy, memset, graphs); each activity of a graph launch has
a row.

Units: ns. Definition: HolisticTraceAnalysis get_cuda_kernel_launch_stats, which supports four CUDA calls.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import LaunchStep, conform_columns, filter_step
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
COLUMNS = {
    "step": pl.Int64,
    "call": pl.String,
    "call_start_ns": pl.Int64,
    "call_ns": pl.Int64,
    "launch_delay_ns": pl.Int64,
    "device_ns": pl.Int64,
    "kind": pl.String,
    "name": pl.String,
    "device": pl.Int64,
    "stream": pl.Int64,
}


def analyze(trace: Trace, *, step: LaunchStep = None) -> pl.DataFrame:
    return conform_columns(join_calls_and_work(trace, step), COLUMNS)


def join_calls_and_work(trace: Trace, step: int | None) -> pl.DataFrame:
    """Return GPU activities with their launch calls: COLUMNS, and launch (id of the call); raise AnalysisError if there
    are none."""
    columns = (
        "launch",
        "step",
        "api",
        "launch_ts",
        "launch_end",
        "ts",
        "dur",
        "kind",
        "name",
        "device",
        "stream",
    )
    work = select_launched_work(trace, *columns).drop_nulls("launch_ts")
    if not work.height:
        raise AnalysisError(
            "the trace contains no launches of its GPU activity",
            where=describe_rank(trace),
            remedy="record CPU and CUDA activity together",
        )
    return (
        filter_step(trace, work, step)
        .with_columns(
            pl.max_horizontal(pl.col("ts") - pl.col("launch_end"), 0).alias("launch_delay_ns"),
            (pl.col("launch_end") - pl.col("launch_ts")).alias("call_ns"),
        )
        .rename({"api": "call", "launch_ts": "call_start_ns", "dur": "device_ns"})
        .sort("call_start_ns", "ts", maintain_order=True)
    )
