"""How far the clocks of ranks differ, told from what they did together: offset, bounds, drift, and how sure it is.

- offset_ns: this clock minus that of the reference rank, the median difference of the ends of collectives that all
  ranks leave together. lowest_ns, highest_ns: it cannot be outside these, since no rank leaves before the last comes.
- spread_ns: half of the differences lie within this much of offset_ns (with the drift taken out); of fewer than three
  communications, half of what lowest_ns and highest_ns allow.
- drift_ppm: how much faster the clock runs, where a second and more of recording tells it.
- residual_ns: how far the clock may still be off once offset_ns is taken out (or left, see verdict): three spreads, as
  far as the bounds allow; 10 us at most of ranks that name the same host (same_host), whose processes read one clock,
  100 us of times that their devices took. What is
  compared across ranks holds to the sum of two ranks' residuals: see clock_error_ns of collectives.
- verdict: reference; agrees (nothing tells it from the reference's, and residual_ns is 10 us or less); unsure (nothing
  tells it from the reference's, but it could as well be off by residual_ns; times are left as they are); corrected
  (times are moved by offset_ns and drift_ppm before ranks are compared); impossible (no offset accords with what was
  recorded: other runs, or a wrong match); unknown (the rank did nothing together with others). The last two are
  compared with nobody. Ranks that share no group, not even through others, have a reference each.

Units: ns, parts per million.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.matched_communication import match_comparable_ranks
from etloom.core.text import format_ranks
from etloom.core.trace import Job

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "reference": pl.Int64,
    "communications": pl.Int64,
    "offset_ns": pl.Int64,
    "lowest_ns": pl.Int64,
    "highest_ns": pl.Int64,
    "spread_ns": pl.Int64,
    "drift_ppm": pl.Float64,
    "residual_ns": pl.Int64,
    "same_host": pl.Boolean,
    "verdict": pl.String,
}


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """What does not follow from the table, for who reads it in a terminal."""
    for verdict, meaning in (
        ("unsure", "may be off by residual_ns: what waits across ranks are shorter than that is not known"),
        (
            "impossible",
            "cannot be compared: however they are set, a rank left before another came; is it one run?",
        ),
        ("unknown", "cannot be compared: they did nothing together with others that were recorded"),
    ):
        ranks = table.filter(pl.col("verdict") == verdict)["rank"].to_list()
        if ranks:
            yield f"the clocks of {format_ranks(ranks)} {meaning}"


def analyze(job: Job) -> pl.DataFrame:
    return conform_columns(match_comparable_ranks(job).clocks, COLUMNS)
