"""Short kernels, whose launch overhead is comparable to their run time.

One row per kernel name: the number and time of its kernels that are shorter than threshold_ns. operator: the one that
launches most of them. gap_ns: idle time of the stream before them, which a fused kernel or a CUDA graph avoids.

Units: ns, percent (of all kernels of the trace or step). Definition: TraceLens' short kernel study.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import Step, conform_columns, filter_step
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.trace import Trace

SCOPE = "rank"
EMPTY_MESSAGE = "no kernel is shorter than --threshold-ns"
COLUMNS = {
    "name": pl.String,
    "operator": pl.String,
    "count": pl.Int64,
    "count_pct": pl.Float64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Float64,
    "gap_ns": pl.Int64,
}


def analyze(
    trace: Trace,
    *,
    threshold_ns: Annotated[int, "Duration below which a kernel is short."] = 10_000,
    step: Step = None,
) -> pl.DataFrame:
    before = pl.col("end").cum_max().shift(1).over("device", "stream")
    kernels = select_launched_work(
        trace, "device", "stream", "step", "kind", "name", "ts", "end", "dur", "operator"
    )
    kernels = kernels.with_columns(gap=(pl.col("ts") - before).clip(0).fill_null(0))
    kernels = filter_step(trace, kernels.filter(pl.col("kind") != "memory"), step)
    short = kernels.filter(pl.col("dur") < threshold_ns)
    around = take_rows(trace.events["name"], rows_of_ids(trace.events, short["operator"]))
    short = short.with_columns(around.alias("operator"))
    table = (
        short.group_by("name")
        .agg(
            pl.col("operator").drop_nulls().cast(pl.String).mode().sort().first(),
            pl.len().alias("count"),
            pl.col("dur").sum().alias("total_ns"),
            pl.col("dur").mean().alias("mean_ns"),
            pl.col("gap").sum().alias("gap_ns"),
        )
        .with_columns(count_pct=100.0 * pl.col("count") / max(1, kernels.height))
    )
    return conform_columns(table, COLUMNS).sort("count", "name", descending=(True, False))
