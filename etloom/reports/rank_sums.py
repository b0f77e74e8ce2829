"""Sums over ranks of tables that have a row per rank and name."""

from __future__ import annotations

import polars as pl

KEYS = ("kind", "name")
SUMMED = ("count", "exclusive_ns", "self_ns", "runtime_ns", "total_ns", "device_ns")


def sum_over_ranks(table: pl.DataFrame, cost: str) -> pl.DataFrame:
    """Sum a table over its ranks by name (and kind, if present); rows sorted by ``cost``, largest first.

    Args:
        table: rank, name, counts and times per rank.
        cost: the column of times to sort by.

    Returns:
        kind, name, ranks (number of ranks), the sums, pct (share of the sum of ``cost``), max_ns (the largest ``cost``
        of a rank) and max_rank (that rank).
    """
    keys = [key for key in KEYS if key in table.columns]
    summed = [name for name in SUMMED if name in table.columns]
    most = pl.col(cost).arg_max()
    total = max(int(table[cost].sum() or 0), 1)
    first = [cost, "pct", "count", "ranks"]
    return (
        table.with_columns(pl.col(key).cast(pl.String) for key in keys)
        .group_by(keys)
        .agg(
            pl.col("rank").n_unique().cast(pl.Int64).alias("ranks"),
            pl.col(summed).sum(),
            pl.col(cost).max().alias("max_ns"),
            pl.col("rank").get(most).alias("max_rank"),
        )
        .with_columns(pct=100.0 * pl.col(cost) / total)
        .select(*keys, *first, *(name for name in summed if name not in first), "max_ns", "max_rank")
        .sort(cost, *keys, descending=[True, *[False] * len(keys)], nulls_last=True)
    )
