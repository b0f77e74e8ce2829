"""Many small collectives in a row, each of which pays the latency of one."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.collectives import parts
from etloom.patterns._finding import Finding
from etloom.patterns._view import View

SMALL_BYTES = 1 << 20
MANY = 8

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    found = parts(view.trace, view.trace.rank or 0).filter(pl.col("collective") != "message")
    ordered = found.sort("start").with_columns(
        small=pl.col("bytes") < SMALL_BYTES,
        run=pl.struct("collective", "pg_name", pl.col("bytes") < SMALL_BYTES).rle_id(),
    )
    runs = (
        ordered.filter(pl.col("small"))
        .group_by("run", "collective", "pg_name")
        .agg(
            pl.len().alias("count"),
            pl.col("bytes").median(),
            (pl.col("end") - pl.col("start")).sum().alias("took"),
        )
        .filter(pl.col("count") >= MANY)
    )
    for row in (
        runs.group_by("collective", "pg_name")
        .agg(pl.col("count", "took").sum(), pl.col("bytes").median(), pl.len().alias("runs"))
        .sort("took", "collective", "pg_name", descending=(True, False, False))
        .iter_rows(named=True)
    ):
        yield Finding(
            f"{row['count']:,} {row['collective']} of {row['bytes'] / 1024:,.0f} KiB each, one after the other",
            # One call in place of each run would still take the time of one.
            round(row["took"] * (1 - row["runs"] / row["count"])),
            "medium",
            "put them into one: a bucket (bucket_cap_mb), a flattened tensor, or a coalescing manager",
            row["count"],
            name=row["collective"],
        )
