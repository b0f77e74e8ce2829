"""Whether a run is slower than a baseline by more than a limit, beyond noise: what a CI job asks.

A measure fails where all of its interval lies above the limit, so that noise alone fails a run about once in forty at
a true change of exactly the limit, and far more rarely at none. It is undecided where there are fewer than 4 values on
a side; a gate that cannot tell does not pass. Several runs of the baseline make their spread part of the interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from etloom.comparing import compare_measures
from etloom.comparing.measures import MEASURES
from etloom.errors import AnalysisError
from etloom.trace import Job


def gate(
    run: Job, baselines: Sequence[Job], max_regression: float, measures: Sequence[str] = ("step-time",)
) -> pl.DataFrame:
    """The table of `compare_measures` with limit_pct and verdict: passed, failed or undecided.

    max_regression: percent. Raises UnknownName for a measure that is not there, and AnalysisError for one that a side
    does not tell of.
    """
    table = compare_measures(baselines, [run], measures)
    told = table.filter(pl.col("values_before").gt(0) & pl.col("values_after").gt(0))["measure"]
    for name in measures:
        if MEASURES[name][0] not in told:
            raise AnalysisError(
                f"the runs do not both tell of {MEASURES[name][0]}",
                remedy="leave the measure out, or record it",
            )
    low, after, before = pl.col("low_pct"), pl.col("median_after"), pl.col("median_before")
    known = pl.col("confidence_pct") >= 95
    # Of nothing, anything is infinitely more.
    appeared = (before == 0) & (after > 0)
    return table.with_columns(
        pl.lit(max_regression, dtype=pl.Float64).alias("limit_pct"),
        pl.when(appeared | (known & (low > max_regression)))
        .then(pl.lit("failed"))
        .when(known)
        .then(pl.lit("passed"))
        .otherwise(pl.lit("undecided"))
        .alias("verdict"),
    )


def sentences(table: pl.DataFrame) -> list[str]:
    """A line for each row of `gate`'s table that did not pass."""
    lines = []
    for row in table.filter(pl.col("verdict") != "passed").iter_rows(named=True):
        if row["verdict"] == "undecided":
            counts = f"{row['values_before']} values before, {row['values_after']} after"
            lines.append(f"{row['measure']}: {counts} are too few to tell; record 4 steps or more of each")
        elif row["low_pct"] is None:
            lines.append(
                f"{row['measure']}: none in the baseline, now {row['median_after']:,.0f} {row['unit']}"
            )
        else:
            lines.append(
                f"{row['measure']}: {row['change_pct']:+.1f} % (95 % interval {row['low_pct']:+.1f} to"
                f" {row['high_pct']:+.1f} %), more than the {row['limit_pct']:g} % allowed"
            )
    return lines
