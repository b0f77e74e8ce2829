"""What is said of many ranks where a line each would be no answer: what their figures run from and to."""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.core.text import format_ranges
from etloom.reports.formatting import choose_column_format

MAX_LISTED_RANKS = 32
"""Ranks beyond which a text has no line for each."""


def summarize_rank_spread(frame: pl.DataFrame) -> pl.DataFrame:
    """Of a table that has a row a rank: figure (a column of numbers), least, its rank, median, most, its rank; in text,
    with units. Columns that say nothing are left out."""
    rows = []
    for name in frame.drop("rank").columns:
        known = frame.select("rank", name).drop_nulls(name)
        if not known.schema[name].is_numeric() or known.is_empty():
            continue
        column = choose_column_format(known, name)
        ordered = known.sort(name, "rank")
        least, most = ordered.row(0), ordered.filter(pl.col(name) == pl.col(name).max()).row(0)
        middle = column.text(_int_if_whole(known[name].median()))
        rows.append((column.header, column.text(least[1]), least[0], middle, column.text(most[1]), most[0]))
    names = ("figure", "least", "of rank", "median", "most", "of rank ")
    schema = {name: pl.Int64 if "rank" in name else pl.String for name in names}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _int_if_whole(value: Any) -> Any:
    return int(value) if value == int(value) else value


def group_stats_by_name(stats: pl.DataFrame) -> pl.DataFrame:
    """The stats of a run, those of one name in a row: ranks, name, severity, count (the sum), example (the first)."""
    groups = stats.group_by("name", "severity", maintain_order=True).agg(
        pl.col("rank"), pl.col("count").sum(), pl.col("example").drop_nulls().first()
    )
    told = [format_ranges(ranks) or "run" for ranks in groups["rank"].list.drop_nulls().to_list()]
    return groups.select(pl.Series("ranks", told, pl.String), "name", "severity", "count", "example")
