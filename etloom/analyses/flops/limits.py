"""The time that calls need at the least, by the peaks of the device."""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.analyses.flops.formulas import MATRIX
from etloom.analyses.flops.peaks import Peaks, find_peaks, infer_precision
from etloom.core.trace import Trace
from etloom.timeline.activity import select_device_events


def list_used_devices(trace: Trace) -> list[int]:
    """The indices of the devices that did work; 0 where the trace does not say which."""
    return select_device_events(trace)["device"].fill_null(0).unique().sort().to_list()


def find_device_peaks(trace: Trace, **asked: Any) -> Peaks:
    """The peaks of the device the trace ran on; see `etloom.analyses.flops.peaks.find_peaks`."""
    return find_peaks(trace, list_used_devices(trace), **asked)


def add_limits(calls: pl.DataFrame, peaks: Peaks) -> pl.DataFrame:
    """calls (see `counted`) with precision, peak (TFLOP/s), compute_ns, memory_ns, ideal_ns (the greater of these).

    Null: a limit whose flops, bytes or peak are not known, and those of a copy over a bus.
    """
    kinds = calls.select("family", "dtype", "tf32").unique()
    spoken = [
        None if family == "copy" else infer_precision(dtype, family in MATRIX, tf32)
        for family, dtype, tf32 in kinds.iter_rows()
    ]
    rates = [None if name is None else peaks.tflops(name) for name in spoken]
    kinds = kinds.with_columns(
        pl.Series("precision", spoken, dtype=pl.String), pl.Series("peak", rates, dtype=pl.Float64)
    )
    calls = calls.join(
        kinds, on=["family", "dtype", "tf32"], how="left", nulls_equal=True, maintain_order="left"
    )
    plain = ~pl.col("bus")
    compute = (
        pl.when(plain & (pl.col("flops") == 0))
        .then(0.0)
        .when(plain)
        .then(pl.col("flops") / pl.col("peak") / 1e3)
    )
    if peaks.bandwidth_gbs is None:
        memory = pl.lit(None, dtype=pl.Float64)
    else:
        memory = pl.when(plain).then(pl.col("bytes") / peaks.bandwidth_gbs)
    return calls.with_columns(compute_ns=compute, memory_ns=memory).with_columns(
        ideal_ns=pl.max_horizontal("compute_ns", "memory_ns")
    )
