"""The difference of two memory snapshots: what each place in the program holds at the peak."""

from __future__ import annotations

import polars as pl

from etloom.analyses.answers import answer
from etloom.core.trace import Job

COLUMNS = {
    "place": pl.String,
    "before_blocks": pl.Int64,
    "after_blocks": pl.Int64,
    "before_bytes": pl.Int64,
    "after_bytes": pl.Int64,
    "change_bytes": pl.Int64,
}
RESERVED = "(peak of reserved memory)"
_ALL = 10**9


def compare_memory(before: Job, after: Job) -> pl.DataFrame:
    """Return what each place holds at the peak of memory in use of each run, summed over ranks and devices, largest
    change first; the first row, `RESERVED`, is the peak of reserved memory.

    Raises:
        AnalysisError: A run has no history of its allocator.
    """
    sides = []
    for name, job in (("before", before), ("after", after)):
        holders = (
            answer(job, "memory-holders", top=_ALL)
            .table.group_by("place")
            .agg(pl.col("blocks", "bytes").sum())
        )
        peak = (
            answer(job, "allocator", rows=0)
            .table.group_by("rank", "device")
            .agg(pl.col("reserved_bytes").max())
        )
        total = pl.DataFrame(
            {"place": [RESERVED], "blocks": [None], "bytes": [int(peak["reserved_bytes"].sum())]}
        )
        sides.append(
            pl.concat([total.cast(holders.schema), holders]).select(  # type: ignore[arg-type]
                "place", pl.col("blocks").alias(f"{name}_blocks"), pl.col("bytes").alias(f"{name}_bytes")
            )
        )
    joined = sides[0].join(sides[1], on="place", how="full", coalesce=True, nulls_equal=True)
    zero = pl.col("before_bytes", "after_bytes").fill_null(0)
    table = joined.with_columns(zero).with_columns(
        change_bytes=pl.col("after_bytes") - pl.col("before_bytes")
    )
    order = [pl.col("place") != RESERVED, -pl.col("change_bytes").abs(), pl.col("place")]
    return table.select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items()).sort(order)
