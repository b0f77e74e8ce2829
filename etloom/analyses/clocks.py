"""How far the clocks of ranks differ, told from what they did together: offset, bounds, drift, and how sure it is.

- offset_ns: this clock minus that of the reference rank, the median difference of the ends of collectives that all
  ranks leave together. lowest_ns, highest_ns: it cannot be outside these, since no rank leaves before the last comes.
- spread_ns: half of the differences lie within this much of offset_ns (with the drift taken out).
- drift_ppm: how much faster the clock runs, where a second and more of recording tells it.
- verdict: reference; agrees (zero is as good: times are left as they are); corrected (times are moved by offset_ns and
  drift_ppm before ranks are compared); impossible (no offset accords with what was recorded: other runs, or a wrong
  match); unknown (the rank did nothing together with the others).

Units: ns, parts per million.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses._activity import answer
from etloom.analyses._together import compared
from etloom.trace import Job

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
    "verdict": pl.String,
}


def analyze(job: Job) -> pl.DataFrame:
    return answer(compared(job).clocks, COLUMNS)
