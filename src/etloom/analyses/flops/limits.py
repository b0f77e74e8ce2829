"""Minimum times of operator calls, from the device's peak FLOP/s and memory bandwidth."""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.peaks import Peaks, find_peaks, infer_precision
from etloom.core.trace import Trace
from etloom.timeline.activity import select_device_events


def list_used_devices(trace: Trace) -> list[int]:
    """Return the indices of the devices with GPU activity, ascending; activity without an index counts as device 0."""
    return select_device_events(trace)["device"].fill_null(0).unique().sort().to_list()


def find_device_peaks(trace: Trace, **options: Any) -> Peaks:
    """Return the peak performance of the trace's device; see `find_peaks`."""
    return find_peaks(trace, list_used_devices(trace), **options)


def add_limits(calls: pl.DataFrame, peaks: Peaks) -> pl.DataFrame:
    """Add the minimum times of calls at the device's peaks: compute_ns, memory_ns, and ideal_ns (the larger one).

    Also adds precision and peak (TFLOP/s).

    A limit is null if its flops, bytes or peak are unknown, and for copies over a bus.

    Args:
        calls: See `count_calls`.
        peaks: The peaks of the device.
    """
    variants = calls.select("family", "dtype", "tf32").unique()
    precisions = [
        None if family == "copy" else infer_precision(dtype, family in MATRIX, tf32)
        for family, dtype, tf32 in variants.iter_rows()
    ]
    rates = [None if name is None else peaks.tflops(name) for name in precisions]
    variants = variants.with_columns(
        pl.Series("precision", precisions, dtype=pl.String), pl.Series("peak", rates, dtype=pl.Float64)
    )
    calls = calls.join(
        variants, on=["family", "dtype", "tf32"], how="left", nulls_equal=True, maintain_order="left"
    )
    on_device = ~pl.col("bus")
    compute = (
        pl.when(on_device & (pl.col("flops") == 0))
        .then(0.0)
        .when(on_device)
        .then(pl.col("flops") / pl.col("peak") / 1e3)
    )
    if peaks.bandwidth_gbs is None:
        memory = pl.lit(None, dtype=pl.Float64)
    else:
        memory = pl.when(on_device).then(pl.col("bytes") / peaks.bandwidth_gbs)
    return calls.with_columns(compute_ns=compute, memory_ns=memory).with_columns(
        ideal_ns=pl.max_horizontal("compute_ns", "memory_ns")
    )


def certain_ns() -> pl.Expr:
    """Return an expression for the time that a call needs for certain, ns, over the columns of `add_limits`.

    That is ideal_ns; of a call that is faster than its memory traffic, and so moved less than its shapes imply,
    compute_ns. It is null for a matrix operation whose arithmetic has no known peak, and where neither limit is known.
    """
    certain = pl.when(pl.col("ideal_ns") > pl.col("time_ns")).then("compute_ns").otherwise("ideal_ns")
    has_limit = pl.col("compute_ns").is_not_null() | ~pl.col("family").is_in(MATRIX)
    return pl.when(has_limit).then(certain)
