"""Roofline: how near each operator comes to what the device can do for its flops and bytes.

A row is an operator with the shapes and types of its arguments. flops, bytes, and mean_ns are of one call; intensity is
flops per byte. attainable: the least of the peak of the precision and of intensity times the memory's bandwidth;
roofline_pct: the time the call would need at the greater of its two limits, of the time it took; bound: which limit
that is. Above 100: the data came from a cache, or less was computed than the shapes say. time is of all device work of
the call (zeroing, split products), and what else ran beside it slows it. A copy over the host's bus has no roofline.

by: arguments, operator (all its shapes), or kernel (a call's flops and bytes are shared out to its kernels by their
time). precision: of matrix products that of the inputs (tf32 where a kernel's name says so), of all others the vector
units'. step: only this step. top: how many rows, the longest first. device_peaks: a file of devices, as
docs/flops.md shows. peak_tflops: use this peak of matrix products, of any precision. bandwidth_gbs: use this memory
bandwidth.

Units: FLOP, B, FLOP/B, ns, TFLOP/s and TB/s (10^12), percent. Needs shapes, and a device whose peaks are known.
Definition: Williams, Waterman, Patterson 2009.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.analyses.helpers import check_top, conform_columns, filter_step
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
COLUMNS = {
    "family": pl.String,
    "name": pl.String,
    "precision": pl.String,
    "calls": pl.Int64,
    "time_ns": pl.Int64,
    "mean_ns": pl.Float64,
    "flops": pl.Float64,
    "bytes": pl.Float64,
    "intensity": pl.Float64,
    "tflops_per_s": pl.Float64,
    "tb_per_s": pl.Float64,
    "attainable_tflops_per_s": pl.Float64,
    "roofline_pct": pl.Float64,
    "bound": pl.String,
    "shapes": pl.String,
    "types": pl.String,
}
_KEYS = {
    "arguments": ["family", "name", "shapes", "types", "precision"],
    "operator": ["family", "name", "precision"],
    "kernel": ["family", "name", "precision"],
}


def analyze(
    trace: Trace,
    *,
    by: str = "arguments",
    step: int | None = None,
    top: int = 50,
    device_peaks: str | None = None,
    peak_tflops: float | None = None,
    bandwidth_gbs: float | None = None,
) -> pl.DataFrame:
    if by not in _KEYS:
        raise UnknownName("grouping", by, _KEYS, option="by")
    check_top(top)
    calls = filter_step(trace, count_calls(trace), step)
    if not calls["time_ns"].count():
        raise AnalysisError(
            "an execution trace alone has no times",
            where=describe_rank(trace),
            remedy="put the Kineto trace of the run beside it; flops needs no times",
        )
    calls = calls.filter("known", pl.col("time_ns") > 0)
    peaks = find_device_peaks(
        trace, device_peaks=device_peaks, peak_tflops=peak_tflops, bandwidth_gbs=bandwidth_gbs
    )
    calls = add_limits(calls, peaks).with_columns(pl.col("flops", "bytes").cast(pl.Float64))
    if by == "kernel":
        calls = _by_kernel(trace, calls)
    per_call = pl.col("time_ns").sum() / pl.len()
    flops, moved = pl.col("flops").mean(), pl.col("bytes").mean()
    limits = pl.col("compute_ns").sum(), pl.col("memory_ns").sum()
    sound = pl.col("memory_ns").is_not_null().all() & pl.col("compute_ns").is_not_null().all()
    # What has a limit of memory but no flops that are known (a fused kernel) is measured by memory.
    by_memory = pl.col("memory_ns").is_not_null().all() & pl.col("flops").is_null().all()
    table = (
        calls.rename({"dims": "shapes"})
        .group_by(_KEYS[by])
        .agg(
            pl.len().alias("calls"),
            flops.alias("flops"),
            moved.alias("bytes"),
            pl.when(moved > 0).then(flops / moved).alias("intensity"),
            pl.col("time_ns").sum(),
            per_call.alias("mean_ns"),
            (flops / per_call / 1e3).alias("tflops_per_s"),
            (moved / per_call / 1e3).alias("tb_per_s"),
            pl.when(sound, flops > 0)
            .then(flops / (pl.max_horizontal(*limits) / pl.len()) / 1e3)
            .alias("attainable_tflops_per_s"),
            pl.when(sound | by_memory)
            .then(100 * pl.col("ideal_ns").sum() / pl.col("time_ns").sum())
            .alias("roofline_pct"),
            pl.when(sound & (limits[0] > limits[1]))
            .then(pl.lit("compute"))
            .when(sound | by_memory)
            .then(pl.lit("memory"))
            .alias("bound"),
        )
        .with_columns(
            pl.lit(None, dtype=pl.String).alias(key) for key in ("shapes", "types") if key not in _KEYS[by]
        )
    )
    order = ["time_ns", *_KEYS["arguments"]]
    table = conform_columns(table, COLUMNS).sort(order, descending=[True] + [False] * 5, nulls_last=True)
    return table.head(top)


def _by_kernel(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """A row a kernel: its share of its call's flops, bytes and limits, by time."""
    work = assign_kernels(trace).select(
        "row", pl.col("name").alias("kernel"), pl.col("dur").alias("kernel_ns")
    )
    parts = calls.drop("name").join(work, on="row").with_columns(all_ns=pl.col("kernel_ns").sum().over("row"))
    share = pl.when(pl.col("all_ns") > 0).then(pl.col("kernel_ns") / pl.col("all_ns"))
    parts = parts.with_columns(
        *(
            (pl.col(name) * share).alias(name)
            for name in ("flops", "bytes", "compute_ns", "memory_ns", "ideal_ns")
        ),
        time_ns="kernel_ns",
        name="kernel",
    )
    return parts.filter(pl.col("time_ns") > 0)
