"""Collectives summarized by type, process group and message size.

Sums and percentiles over the communications of `collectives`, which defines the columns: transfer is the time of the
data transfer itself, wait the longest wait of a rank for others. slowest_over_median is the longest transfer divided by
the median; a value far above 1, at one size and in one group, indicates that the link or the device was busy with other
work.

Units: ns, B, GB/s with GB = 1e9 B. Percentiles are interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.collectives import explain_unmatched, summarize_instances
from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.matched_communication import match_communications
from etloom.core.trace import Job

SCOPE = "job"
COLUMNS = {
    "collective": pl.String,
    "group": pl.String,
    "axis": pl.String,
    "group_size": pl.Int64,
    "bytes": pl.Int64,
    "count": pl.Int64,
    "matched": pl.Int64,
    "duration_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "transfer_ns": pl.Int64,
    "transfer_p50_ns": pl.Float64,
    "transfer_p95_ns": pl.Float64,
    "transfer_max_ns": pl.Int64,
    "slowest_over_median": pl.Float64,
    "algo_p50_gb_per_s": pl.Float64,
    "bus_p50_gb_per_s": pl.Float64,
}


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield a note for the terminal on communications that could not be matched across ranks."""
    unmatched = int((table["count"] - table["matched"]).sum())
    if unmatched:
        size = table.filter(pl.col("count") > pl.col("matched"))["group_size"].max()
        yield f"{unmatched:,} of {table['count'].sum():,} communications {explain_unmatched(size)}"  # type: ignore[arg-type]


def analyze(job: Job) -> pl.DataFrame:
    transfer = pl.col("transfer_ns")
    table = (
        summarize_instances(match_communications(job).comparable)
        .group_by("collective", "group", "axis", "group_size", "bytes", maintain_order=True)
        .agg(
            pl.len().alias("count"),
            (pl.col("recorded") > 1).sum().alias("matched"),
            pl.col("duration_ns").sum(),
            *(pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()) for name in ("wait_ns",)),
            pl.when(transfer.count() > 0).then(transfer.sum()).alias("transfer_ns"),
            transfer.quantile(0.5, "linear").alias("transfer_p50_ns"),
            transfer.quantile(0.95, "linear").alias("transfer_p95_ns"),
            transfer.max().alias("transfer_max_ns"),
            (transfer.max() / transfer.median()).alias("slowest_over_median"),
            pl.col("algo_gb_per_s").median().alias("algo_p50_gb_per_s"),
            pl.col("bus_gb_per_s").median().alias("bus_p50_gb_per_s"),
        )
        .sort(
            "duration_ns",
            "collective",
            "group",
            "bytes",
            descending=(True, False, False, False),
            maintain_order=True,
        )
    )
    return conform_columns(table, COLUMNS)
