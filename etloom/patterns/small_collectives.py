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
    found = view.trace.once(parts, view.trace.rank or 0).filter(pl.col("collective") != "message")
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
            pl.col("start").first(),
            pl.col("issuer").first(),
        )
        .filter(pl.col("count") >= MANY)
        # One call in place of each run would still take the time of one.
        .with_columns(cost=(pl.col("took") * (1 - 1 / pl.col("count"))).round().cast(pl.Int64))
        .sort("cost", "run", descending=(True, False))
    )
    marks = [view.step_at(start) for start in runs["start"]]
    runs = runs.with_columns(step=pl.Series(marks, dtype=pl.Int64))
    for row in (
        runs.group_by("collective", "pg_name")
        .agg(
            pl.col("count", "cost").sum(),
            pl.col("bytes").median(),
            pl.col("step", "issuer").first(),
            in_steps_ns=pl.col("cost").filter(pl.col("step").is_not_null()).sum(),
        )
        .sort("cost", "collective", "pg_name", descending=(True, False, False))
        .iter_rows(named=True)
    ):
        yield Finding(
            f"{row['count']:,} {row['collective']} of {row['bytes'] / 1024:,.0f} KiB each, one after the other",
            row["cost"],
            "medium",
            "put them into one: a bucket (bucket_cap_mb), a flattened tensor, or a coalescing manager",
            row["count"],
            step=row["step"],
            name=row["collective"],
            event=row["issuer"],
            in_steps_ns=row["in_steps_ns"],
            place=f"{row['collective']} {row['pg_name']}",
        )
