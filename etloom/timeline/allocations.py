"""Allocations and frees of a rank, with the memory that its processes have allocated on each device."""

from __future__ import annotations

import polars as pl

from etloom.core.trace import Trace

_DEVICE = ("device_type", "device")


def find_allocations(trace: Trace) -> pl.DataFrame:
    """Return the rows of the table ``memory`` whose size is known, in order of time.

    Each process records the totals of its own allocator. Where several processes of the rank use a device,
    ``total_allocated`` and ``total_reserved`` are the sums over them.
    """
    allocations = trace.memory.drop_nulls(["total_allocated", "ts", "bytes"]).sort("ts", "id")
    processes = allocations.select(*_DEVICE, "pid").unique()
    if processes.height == processes.select(_DEVICE).unique().height:
        return allocations
    first = allocations.with_columns(is_first=pl.int_range(pl.len()).over(*_DEVICE, "pid") == 0)
    # Before its first event a process has its total minus the change; the reserved memory is assumed unchanged.
    for total, change in (("total_allocated", pl.col("bytes")), ("total_reserved", pl.lit(0, pl.Int64))):
        first = first.with_columns(
            change=pl.when("is_first").then(change).otherwise(pl.col(total).diff().over(*_DEVICE, "pid")),
            before=pl.when("is_first").then(pl.col(total) - change),
        ).with_columns(
            (pl.col("before").sum() + pl.col("change").fill_null(0).cum_sum()).over(*_DEVICE).alias(total)
        )
    return first.drop("is_first", "change", "before")
