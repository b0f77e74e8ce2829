"""Roofline: achieved performance of operators relative to the device's compute and memory limits.

One row per operator, shapes and types of its arguments. flops, bytes and mean_ns are per call; intensity is flops per
byte. attainable: the smaller of the precision's peak and intensity times memory bandwidth; roofline_pct: the time the
call needs at the tighter of its two limits, relative to the time it took; bound: which limit that is. Above 100: data
came from a cache, or less was computed than the shapes imply. Times include all GPU activity of the call (zeroing,
split products), and concurrent activities slow it down. A memcpy over the host's bus has no roofline.

The precision of a matrix product is that of its inputs (tf32 if a kernel's name indicates it); other operators use the
vector units.

Units: FLOP, B, FLOP/B, ns, TFLOP/s and TB/s (10^12), percent. Needs shapes, and a device with known peaks.
Definition: Williams, Waterman, Patterson 2009.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.analyses.flops.limits import add_limits, find_device_peaks
from etloom.analyses.flops.peaks import check_device
from etloom.analyses.helpers import Step, check_top, conform_columns, filter_step
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
_GROUP_COLUMNS = {
    "arguments": ["family", "name", "shapes", "types", "precision"],
    "operator": ["family", "name", "precision"],
    "kernel": ["family", "name", "precision"],
}


def analyze(
    trace: Trace,
    *,
    by: Annotated[
        str,
        "arguments, operator (all its shapes), or kernel (flops and bytes of a call are divided among "
        "its kernels by time).",
    ] = "arguments",
    step: Step = None,
    top: Annotated[int, "Number of rows, longest time first."] = 50,
    device: Annotated[str | None, "The device (H100), if the trace does not name it."] = None,
    device_peaks: Annotated[str | None, "A file of device peaks, as shown in docs/flops.md."] = None,
    peak_tflops: Annotated[float | None, "Use this peak for matrix products of any precision."] = None,
    bandwidth_gbs: Annotated[float | None, "Use this memory bandwidth."] = None,
) -> pl.DataFrame:
    if by not in _GROUP_COLUMNS:
        raise UnknownName("grouping", by, _GROUP_COLUMNS, option="by")
    check_top(top)
    check_device(device, device_peaks)
    calls = filter_step(trace, count_calls(trace), step)
    if not calls["time_ns"].count():
        raise AnalysisError(
            "an execution trace contains no times",
            where=describe_rank(trace),
            remedy="add the run's Kineto trace to the folder, or use flops, which needs no times",
        )
    calls = calls.filter("known", pl.col("time_ns") > 0)
    peaks = find_device_peaks(
        trace, device=device, device_peaks=device_peaks, peak_tflops=peak_tflops, bandwidth_gbs=bandwidth_gbs
    )
    calls = add_limits(calls, peaks).with_columns(pl.col("flops", "bytes").cast(pl.Float64))
    if by == "kernel":
        calls = _by_kernel(trace, calls)
    table = (
        calls.rename({"dims": "shapes"})
        .group_by(_GROUP_COLUMNS[by])
        .agg(_aggregate())
        .with_columns(
            pl.lit(None, dtype=pl.String).alias(key)
            for key in ("shapes", "types")
            if key not in _GROUP_COLUMNS[by]
        )
    )
    order = ["time_ns", *_GROUP_COLUMNS["arguments"]]
    table = conform_columns(table, COLUMNS).sort(order, descending=[True] + [False] * 5, nulls_last=True)
    return table.head(top)


def _aggregate() -> list[pl.Expr]:
    """Return expressions that aggregate the operator calls of a group (see `add_limits`) into a row of the table."""
    per_call = pl.col("time_ns").sum() / pl.len()
    flops, bytes_per_call = pl.col("flops").mean(), pl.col("bytes").mean()
    limits = pl.col("compute_ns").sum(), pl.col("memory_ns").sum()
    has_limits = pl.col("memory_ns").is_not_null().all() & pl.col("compute_ns").is_not_null().all()
    # Calls with a memory limit but unknown flops (a fused kernel) are compared with the memory limit.
    by_memory = pl.col("memory_ns").is_not_null().all() & pl.col("flops").is_null().all()
    return [
        pl.len().alias("calls"),
        flops.alias("flops"),
        bytes_per_call.alias("bytes"),
        pl.when(bytes_per_call > 0).then(flops / bytes_per_call).alias("intensity"),
        pl.col("time_ns").sum(),
        per_call.alias("mean_ns"),
        (flops / per_call / 1e3).alias("tflops_per_s"),
        (bytes_per_call / per_call / 1e3).alias("tb_per_s"),
        pl.when(has_limits, flops > 0)
        .then(flops / (pl.max_horizontal(*limits) / pl.len()) / 1e3)
        .alias("attainable_tflops_per_s"),
        pl.when(has_limits | by_memory)
        .then(100.0 * pl.col("ideal_ns").sum() / pl.col("time_ns").sum())
        .alias("roofline_pct"),
        pl.when(has_limits & (limits[0] > limits[1]))
        .then(pl.lit("compute"))
        .when(has_limits | by_memory)
        .then(pl.lit("memory"))
        .alias("bound"),
    ]


def _by_kernel(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Return one row per kernel with its share, by time, of the flops, bytes and limits of its operator call."""
    work = assign_kernels(trace).select(
        "row", "replay", pl.col("name").alias("kernel"), pl.col("dur").alias("kernel_ns")
    )
    keys = ["row", "replay"]
    parts = calls.drop("name").join(work, on=keys).with_columns(all_ns=pl.col("kernel_ns").sum().over(keys))
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
