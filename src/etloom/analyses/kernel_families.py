"""Device time by kernel family: gemm, attention, convolution, elementwise, communication, ...

One row per family. The family of a kernel is that of the operator that launched it if the operator's cost is known
(aten::mm is gemm), else it is inferred from the kernel's name; other: neither. That of a copy or fill (memcpy, memset)
is always inferred. total_ns is the sum of durations, so
concurrent kernels are each counted in full.

Units: ns, percent (of the sum of all rows). Needs no shapes; see flops for the computed operations of the families.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.flops.counting import assign_kernels, lookup_families
from etloom.analyses.helpers import LaunchStep, conform_columns, filter_step, percent_of_total
from etloom.core.arrays import take_rows
from etloom.core.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "family": pl.String,
    "kernels": pl.Int64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Float64,
    "total_pct": pl.Float64,
    "longest": pl.String,
}


def classify_kernels(trace: Trace) -> pl.DataFrame:
    """Return GPU activities with their family: id, kind, name, step, ts, dur, ...

    Raises:
        AnalysisError: The trace has no GPU activity.
    """
    work = assign_kernels(trace)
    operator_families = lookup_families(take_rows(trace.events["name"], work["row"].to_numpy()))
    return work.with_columns(
        family=pl.when(pl.col("kind") != "computation")
        .then("kernel_family")
        .otherwise(pl.coalesce(operator_families, "kernel_family"))
        .cast(pl.String),
        name=pl.col("name").cast(pl.String),
    )


def analyze(trace: Trace, *, step: LaunchStep = None) -> pl.DataFrame:
    dur = pl.col("dur")
    sums = filter_step(trace, classify_kernels(trace), step)
    longest = (
        sums.group_by("family", "name")
        .agg(dur.sum())
        .sort("dur", "name", descending=(True, False))
        .unique("family", keep="first", maintain_order=True)
        .select("family", longest="name")
    )
    table = (
        sums.group_by("family")
        .agg(pl.len().alias("kernels"), dur.sum().alias("total_ns"), dur.mean().alias("mean_ns"))
        .with_columns(percent_of_total("total_ns"))
        .join(longest, on="family", how="left")
        .sort("total_ns", "family", descending=(True, False))
    )
    return conform_columns(table, COLUMNS)
