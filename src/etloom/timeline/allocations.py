"""Allocations and frees of a rank, with the memory that its processes have allocated on each device."""

from __future__ import annotations

import polars as pl

from etloom.core.trace import Trace

_DEVICE = ("device_type", "device")
_PROCESS = (*_DEVICE, "pid")


def find_allocations(trace: Trace, *, in_order: bool = False) -> pl.DataFrame:
    """Return the rows of the table ``memory`` whose size is known, in order of time.

    Rows without time are left out; with ``in_order`` they are returned, in the order of the file, if no row has a time.

    Each process records the totals of its own allocator. Where processes of the rank use a device at the same time,
    ``total_allocated`` and ``total_reserved`` are the sums over them.
    """
    sized = trace.memory.drop_nulls(["total_allocated", "bytes"])
    if in_order and sized["ts"].null_count() == sized.height:
        return sized.sort("id")
    allocations = sized.drop_nulls("ts").sort("ts", "id")
    spans = allocations.group_by(*_PROCESS).agg(start=pl.col("ts").min(), end=pl.col("ts").max())
    # A process without a pid may be one of the others, as in a memory snapshot next to a Kineto trace.
    if spans.height < 2 or (spans["pid"] < 0).any():
        return allocations
    ends = pl.col("end").cum_max().shift(1).over(*_DEVICE)
    if not spans.sort("start").select((pl.col("start") <= ends).any()).item():
        return allocations  # one process after another, as when a job was started again
    return _sum_over_processes(allocations)


def _sum_over_processes(allocations: pl.DataFrame) -> pl.DataFrame:
    """Replace the totals of each process by the sums over the processes of its device."""
    rows = allocations.with_columns(
        pl.col("total_reserved").forward_fill().backward_fill().over(*_PROCESS),
        is_first=pl.int_range(pl.len()).over(*_PROCESS) == 0,
    )
    # Before its first event a process has its total minus the change; the reserved memory is assumed unchanged.
    for total, first_change in (
        ("total_allocated", pl.col("bytes")),
        ("total_reserved", pl.lit(0, pl.Int64)),
    ):
        rows = rows.with_columns(
            change=pl.when("is_first").then(first_change).otherwise(pl.col(total).diff().over(*_PROCESS)),
            before=pl.when("is_first").then(pl.col(total) - first_change),
        ).with_columns(
            pl.when(pl.col(total).is_not_null().any().over(*_DEVICE))
            .then((pl.col("before").sum() + pl.col("change").fill_null(0).cum_sum()).over(*_DEVICE))
            .alias(total)
        )
    return rows.drop("is_first", "change", "before")
