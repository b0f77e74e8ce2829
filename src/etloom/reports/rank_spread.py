"""Short tables for runs of many ranks: minimum, median and maximum of each column instead of a row per rank."""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.core.text import format_ranges
from etloom.reports.formatting import choose_column_format

MAX_LISTED_RANKS = 32
"""Number of ranks above which a text does not have a line for each."""


def summarize_rank_spread(frame: pl.DataFrame) -> pl.DataFrame:
    """Summarize the numeric columns of a table with a row per rank: minimum, median, maximum, as text with units.

    Returns figure (the column's header), minimum and its rank, median, maximum and its rank. Columns without values are
    omitted.
    """
    rows = []
    for name in frame.drop("rank").columns:
        values = frame.select("rank", name).drop_nulls(name)
        if not values.schema[name].is_numeric() or values.is_empty():
            continue
        column = choose_column_format(values, name)
        ordered = values.sort(name, "rank")
        smallest, largest = ordered.row(0), ordered.filter(pl.col(name) == pl.col(name).max()).row(0)
        median = column.text(_to_integer(values[name].median()))
        rows.append(
            (
                column.header,
                column.text(smallest[1]),
                smallest[0],
                median,
                column.text(largest[1]),
                largest[0],
            )
        )
    names = ("figure", "minimum", "rank", "median", "maximum", "rank ")
    schema = {name: pl.Int64 if "rank" in name else pl.String for name in names}
    return pl.DataFrame(rows, schema=schema, orient="row")


def group_equal_ranks(frame: pl.DataFrame, ignored: str | None = None) -> pl.DataFrame:
    """Merge rows that are equal in all columns but ``rank``; ``ranks`` replaces ``rank``, such as "0-3" or "run".

    Args:
        frame: a table with a row per rank, or several.
        ignored: a column that does not count; the row of the first rank states it.

    Returns:
        The groups in the order of their first rows; the frame itself if no two rows are equal.
    """
    keys = [name for name in frame.columns if name not in ("rank", ignored)]
    is_run_row = pl.col("rank").is_null().alias("of the run")  # not of a rank: a row of its own
    groups = frame.group_by(*keys, is_run_row, maintain_order=True).agg(
        pl.exclude(keys).first(), ranks=pl.col("rank")
    )
    if groups.height == frame.height:
        return frame
    ranks = [format_ranges(ranks) or "run" for ranks in groups["ranks"].list.drop_nulls().to_list()]
    return groups.select(
        pl.Series("ranks", ranks, pl.String), *(name for name in frame.columns if name != "rank")
    )


def _to_integer(value: Any) -> Any:
    return int(value) if value == int(value) else value


def group_stats_by_name(stats: pl.DataFrame) -> pl.DataFrame:
    """Group data-quality rows by name and severity: ranks, name, severity, count (sum), example (the first)."""
    groups = stats.group_by("name", "severity", maintain_order=True).agg(
        pl.col("rank"), pl.col("count").sum(), pl.col("example").drop_nulls().first()
    )
    ranks = [format_ranges(ranks) or "run" for ranks in groups["rank"].list.drop_nulls().to_list()]
    return groups.select(pl.Series("ranks", ranks, pl.String), "name", "severity", "count", "example")
