"""Describes lost data in one line, from the table ``stats``."""

from __future__ import annotations

import polars as pl

from etloom.core.text import format_ranks


def describe_loss(stats: pl.DataFrame) -> str | None:
    """Summarize `stats` rows about lost or doubtful data in one line: names, counts, ranks; None if there are none.

    Args:
        stats: The table ``stats`` of a Trace or of a Job.
    """
    problems = stats.filter(pl.col("severity") != "info")
    if "rank" not in problems.columns:
        problems = problems.with_columns(rank=pl.lit(None, pl.Int64))
    names_by_ranks: dict[tuple[int, ...], list[str]] = {}
    for (name,), rows in problems.group_by("name", maintain_order=True):
        ranks = tuple(rows["rank"].drop_nulls().unique().sort())
        names_by_ranks.setdefault(ranks, []).append(f"{name} {rows['count'].sum():,}")
    parts = [
        ", ".join(names) + (f" ({format_ranks(ranks)})" if ranks else "")
        for ranks, names in names_by_ranks.items()
    ]
    return "; ".join(parts) or None
