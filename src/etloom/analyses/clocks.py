"""Clock offset, bounds and drift of each rank, inferred from the communications the ranks share.

- offset_ns: this clock minus the clock of the reference rank: the median difference of the end times of collectives
  that all ranks leave together. lower_bound_ns, upper_bound_ns: limits of the offset, because no rank can leave a
  collective before the last one arrives.
- spread_ns: half of the differences are within this distance of offset_ns (drift removed); with fewer than three
  communications, half of the distance between the bounds.
- drift_ppm: how much faster this clock runs; known if at least a second of recording is available.
- residual_ns: remaining uncertainty of the clock after offset_ns is removed (or kept, see verdict): three spreads,
  limited by the bounds; at most 10 µs for ranks with the same host name (same_host), whose processes read one clock,
  and 100 µs for times measured by their devices. Comparisons across ranks are accurate to the sum of both ranks'
  residuals: see clock_error_ns of collectives.
- verdict: reference; agrees (consistent with the reference's clock, residual_ns at most 10 µs); unsure (consistent with
  the reference's clock, but it may be off by residual_ns; times are not changed); corrected (times are corrected by
  offset_ns and drift_ppm before ranks are compared); impossible (no offset is consistent with the recording: different
  runs, or wrongly matched communications); unknown (the rank shares no communication with others). Ranks with one of
  the last two are not compared. Groups of ranks that no communication connects have one reference each.

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
    "lower_bound_ns": pl.Int64,
    "upper_bound_ns": pl.Int64,
    "spread_ns": pl.Int64,
    "drift_ppm": pl.Float64,
    "residual_ns": pl.Int64,
    "same_host": pl.Boolean,
    "verdict": pl.String,
}


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield notes for the terminal on ranks whose clocks are uncertain or cannot be compared."""
    for verdict, meaning in (
        ("unsure", "may be off by residual_ns: waits across ranks shorter than that are not significant"),
        (
            "impossible",
            "cannot be compared: for any offset, a rank left before another arrived; check that this is one run",
        ),
        ("unknown", "cannot be compared: they share no communication with other recorded ranks"),
    ):
        ranks = table.filter(pl.col("verdict") == verdict)["rank"].to_list()
        if ranks:
            yield f"the clocks of {format_ranks(ranks)} {meaning}"


def analyze(job: Job) -> pl.DataFrame:
    return conform_columns(match_comparable_ranks(job).clocks, COLUMNS)
