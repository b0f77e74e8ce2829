"""Which rank the others wait for, how long, and what it did instead: a row a rank.

The rank that comes last to a communication delays it by delay_ns: from the coming of the last but one to its own. What
the two did since each left the communication before in the same group is compared, which splits the delay without a
rest:

- longer_compute_ns: it computed longer.
- other_work_ns: it did other work longer: other groups' communication, copies.
- late_launch_ns: its device had nothing to do for longer, since the host came late with it. (Of gloo, on the host: it
  was in no operator for longer, which is Python, input data, or a thread kept waiting.)
- before_ns: it came later out of the communication before, or that was not recorded.

A part can be negative: the rank made up for some of the rest. cause names the largest.

- communications: that others took part in; last: those it came last to. waited_ns: what it waited for others itself.
- pct: delay_ns in percent of the time from the first communication to the end of the last; delays
  of communications that are under way at one time count each.

Units: ns, percent. Times of the ranks are put on one clock first, see clocks. A slow link shows in collectives, as
transfer_ns above that of others of the same size.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses._activity import answer
from etloom.analyses._together import compared
from etloom.collectives.lateness import CAUSES, cause, delays
from etloom.trace import Job

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "communications": pl.Int64,
    "last": pl.Int64,
    "delay_ns": pl.Int64,
    "pct": pl.Float64,
    **dict.fromkeys(CAUSES, pl.Int64),
    "cause": pl.String,
    "waited_ns": pl.Int64,
}


def analyze(job: Job) -> pl.DataFrame:
    parts = compared(job).parts.filter(pl.col("meeting").is_not_null())
    span = parts.select((pl.col("end").max() - pl.col("start").min()).cast(pl.Float64)).item()
    sums = delays(parts, job).group_by("rank").agg(pl.len().alias("last"), pl.col("delay_ns", *CAUSES).sum())
    arrival = pl.col("start").max().over("meeting")
    table = (
        parts.group_by("rank", maintain_order=True)
        .agg(pl.len().alias("communications"))
        .join(
            parts.with_columns(waited=arrival - pl.col("start")).group_by("rank").agg(pl.col("waited").sum()),
            on="rank",
        )
        .join(sums, on="rank", how="left")
        .with_columns(pl.col("last", "delay_ns", *CAUSES).fill_null(0), waited_ns="waited")
        .with_columns(pct=100 * pl.col("delay_ns") / span, cause=cause())
        .sort("delay_ns", "rank", descending=(True, False))
    )
    return answer(table, COLUMNS)
