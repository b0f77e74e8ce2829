"""Stragglers: which ranks delay others at communications, for how long, and why; one row per rank.

The rank with the largest delay of its own (not inherited) comes first.

The last rank to arrive at a communication, while another waits for it, delays it by delay_ns: from the arrival of the
second-last rank to its own. The activities of the two since each left the previous communication of the same group are
compared, which splits the delay completely:

- longer_compute_ns: it computed longer.
- other_work_ns: it spent longer on other work: communication of groups with other members, memcpys.
- late_launch_ns: its device was idle for longer because the host launched late. (For gloo, on the host: it was outside
  of operators for longer, which is Python, input data, or a blocked thread.)
- inherited_delay_ns: it left the previous communication later; or that was not recorded, so that the cause is unknown:
  the delay at the first recorded communication of a group is never the rank's own.

A part can be negative: the rank made up for some of the others.

- slow_link_ns: how much longer the communications with this rank transferred data than comparable ones (same
  collective, size, number of ranks) without it: difference of the medians, times their number; null if there are no
  comparable ones without it, for example if all ranks take part in everything.
- cause names the largest of these.
- communications: those with other participants; last: those it arrived last at (if others were waited for as well,
  only the last rank counts); late_confirmed: of these, those it delayed by more than the clock uncertainty of the two
  ranks (see clocks). waited_ns: time it waited for others itself, as in arrivals.
- worst_ns: its longest delay, worst_start_ns: the arrival, worst_step: its step at that time.
- pct: delay_ns as percentage of the time from the first communication to the end of the last; delays of concurrent
  communications are each counted in full.

The finding `stragglers` answers another question, what would be gained if the rank were like its peers: it counts from
the arrival of the median rank instead of the second-last one, without the inherited part, and each moment once. So its
cost is the larger one if several ranks are late, and the smaller one if a rank passes on the lateness of others. At the
first recorded communication of a group, it compares the work since the recordings began, so that it may name a cause
where this table has none.

Units: ns, percent. Times of the ranks are first converted to one clock, see clocks.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.collectives import summarize_instances
from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.matched_communication import match_comparable_ranks
from etloom.collectives.lateness import CAUSES, compute_delays, largest_cause
from etloom.core.trace import Job
from etloom.timeline.activity import find_steps

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "communications": pl.Int64,
    "last": pl.Int64,
    "late_confirmed": pl.Int64,
    "delay_ns": pl.Int64,
    "pct": pl.Float64,
    **dict.fromkeys(CAUSES, pl.Int64),
    "slow_link_ns": pl.Int64,
    "cause": pl.String,
    "worst_ns": pl.Int64,
    "worst_start_ns": pl.Int64,
    "worst_step": pl.Int64,
    "waited_ns": pl.Int64,
}


def analyze(job: Job) -> pl.DataFrame:
    participations = match_comparable_ranks(job).comparable
    parts = participations.filter(pl.col("instance").is_not_null())
    span = parts.select((pl.col("end").max() - pl.col("start").min()).cast(pl.Float64)).item()
    late = compute_delays(participations, job)
    worst = pl.when(pl.col("delay_ns").max() > 0).then(pl.col("delay_ns").arg_max())
    sums = late.group_by("rank").agg(
        pl.len().alias("last"),
        (pl.col("delay_ns") > pl.col("error")).sum().alias("late_confirmed"),
        pl.col("delay_ns", *CAUSES).sum(),
        pl.col("delay_ns").get(worst).alias("worst_ns"),
        pl.col("start").get(worst).alias("worst_start_ns"),
        pl.col("own_start").get(worst).alias("own_start"),
    )
    caused_delay = pl.col("delay_ns") - pl.col("inherited_delay_ns").clip(0)
    table = (
        parts.group_by("rank", maintain_order=True)
        .agg(pl.len().alias("communications"), pl.col("wait").sum().alias("waited_ns"))
        .join(sums, on="rank", how="left")
        .join(_compare_links(parts), on="rank", how="left")
        .with_columns(pl.col("last", "late_confirmed", "delay_ns", *CAUSES).fill_null(0))
        .with_columns(pct=100.0 * pl.col("delay_ns") / span, cause=largest_cause("slow_link_ns"))
        .sort(caused_delay, "delay_ns", "rank", descending=(True, True, False))
    )
    marks = [_find_step(job, rank, at) for rank, at in table.select("rank", "own_start").iter_rows()]
    return conform_columns(table.with_columns(worst_step=pl.Series(marks, dtype=pl.Int64)), COLUMNS)


def _compare_links(parts: pl.DataFrame) -> pl.DataFrame:
    """Return slow_link_ns of each rank: the total time by which its transfers exceed equal transfers without that
    rank."""
    kind = ("collective", "bytes", "recorded")
    transfers = (
        summarize_instances(parts)
        .with_row_index("number")
        .select("number", *kind, "instance", "transfer_ns")
        .drop_nulls()
    )
    members = transfers.join(parts.select("instance", "rank").unique(), on="instance")
    by_rank = members.partition_by("rank", as_dict=True)
    slow_links = {}
    for rank in parts["rank"].unique().to_list():
        rank_transfers = by_rank.get((rank,), members.clear())
        usual_without = (
            transfers.join(rank_transfers, on="number", how="anti")
            .group_by(kind)
            .agg(median_ns=pl.col("transfer_ns").median())
        )
        usual_with = rank_transfers.group_by(kind).agg(pl.col("transfer_ns").median(), count=pl.len())
        compared = usual_with.join(usual_without, on=kind)
        excess = compared.select(
            ((pl.col("transfer_ns") - pl.col("median_ns")).clip(0) * pl.col("count")).sum()
        ).item()
        slow_links[rank] = round(excess) if compared.height else None
    table = pl.DataFrame({"rank": list(slow_links), "slow_link_ns": list(slow_links.values())})
    return table.cast({"rank": parts.schema["rank"], "slow_link_ns": pl.Int64})


def _find_step(job: Job, rank: int, at: int | None) -> int | None:
    """Return the step of a rank that contains the time ``at`` (ns, on the rank's clock); None if no step does."""
    if at is None:
        return None
    inside = find_steps(job[rank]).filter(pl.col("start") <= at, pl.col("end") > at)
    return inside["step"][0] if inside.height else None
