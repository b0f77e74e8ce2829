"""Access to the data of each rank of a job for the finding patterns; a few ranks are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial

import numpy as np
import polars as pl

from etloom.analyses.findings.rank_findings import find_in_rank
from etloom.analyses.findings.rank_view import RankView
from etloom.collectives import match_collectives
from etloom.core.arrays import group_rows, is_present, take_rows, to_array
from etloom.core.intervals import EMPTY, Intervals
from etloom.core.trace import Job
from etloom.timeline.activity import compute_activity, find_first_time

CACHED_VIEWS = 8
"""Number of cached views: their derived tables are much larger than the findings, and patterns iterate over ranks."""


class JobView(Mapping[int, RankView]):
    """Maps each rank of a linked job to its `RankView`; the least recently used views are discarded."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._cache: dict[int, RankView] = {}

    def __getitem__(self, rank: int) -> RankView:
        view = self._cache.pop(rank, None) or self._open_view(rank)
        self._cache[rank] = view
        if len(self._cache) > CACHED_VIEWS:
            del self._cache[next(iter(self._cache))]
        return view

    def __iter__(self) -> Iterator[int]:
        return iter(self.job)

    def __len__(self) -> int:
        return len(self.job)

    def _open_view(self, rank: int) -> RankView:
        trace = self.job[rank]
        stored = trace.compute_once(find_in_rank) if trace.has_result(find_in_rank) else None
        return RankView(trace, partial(self._find_waits, rank), partial(self._find_delays, rank), stored)

    def _find_waits(self, rank: int) -> Intervals:
        return self._waits.get(rank, EMPTY)

    def _find_delays(self, rank: int) -> Intervals:
        if len(self) < 2:
            return EMPTY
        late = self.late_arrivals.filter(rank=rank)
        return Intervals.of(late["own_start"] - late["own_late_ns"], late["own_start"])

    @cached_property
    def late_arrivals(self) -> pl.DataFrame:
        """The late arrivals of ranks at communications; see `find_late_arrivals`."""
        return find_late_arrivals(self.participations, self._waits, self.job)

    @cached_property
    def participations(self) -> pl.DataFrame:
        """The ranks' participations in communications that were matched across ranks with comparable clocks."""
        comparable = match_collectives(self.job).comparable
        return comparable.filter(pl.col("instance").is_not_null())

    @cached_property
    def _waits(self) -> dict[int, Intervals]:
        """Return the times at which each rank was blocked in communications waiting for others, on the rank's clock."""
        if len(self) < 2:
            return {}
        waits = self.participations.filter(pl.col("wait") > pl.col("error"))
        # Waits are measured on the common clock, which may run faster than the rank's own.
        waits = waits.with_columns(until=pl.min_horizontal(pl.col("own_start") + pl.col("wait"), "own_end"))
        return {
            rank: Intervals.of(rank_waits["own_start"], rank_waits["until"])
            for (rank,), rank_waits in waits.group_by("rank")
        }


# Find late arrivals at communications: the delay behind the median rank, the part the rank itself caused, and why.
#
# A rank that waited for others since its last communication with the same ranks only passes their lateness on: that
# part is inherited, and is not counted as its own.

REASONS = ("longer_compute", "other_work", "late_launch", "late_first", "later_recording")
"""Reasons of a rank's own lateness. late_first: no earlier communication with these ranks was recorded, and the rank
did not compute longer before it; later_recording: its recording began later than that of the median rank, too."""


def find_late_arrivals(parts: pl.DataFrame, waits: Mapping[int, Intervals], job: Job) -> pl.DataFrame:
    """Return the late arrivals at communications: later than the median rank by more than the clock uncertainty.

    Only arrivals that other ranks waited for count.

    Of an even number of ranks, the median is the earlier one: of two ranks, the later one is late by the whole time
    that the other waited.

    Args:
        parts: Matched rows of `MatchedCollectives.comparable`.
        waits: When each rank was blocked in communications waiting for others, on its own clock.
        job: The traces by rank.

    Returns:
        The columns of ``parts``, and late_ns, which is at most the time for which any rank waited and the time since
        the rank's recording began; own_late_ns, the part of it that is not inherited; reason, one of `REASONS`.
    """
    start, awaited = pl.col("start"), pl.col("awaited")
    until = (start + pl.col("wait")).filter(awaited.is_not_null()).max().over("instance")
    usual_start = start.sort().get((pl.len() - 1) // 2).over("instance")
    is_awaited = start <= awaited.max().over("instance")
    late = parts.with_columns(
        late_ns=pl.min_horizontal(start, until) - usual_start, usual_start=usual_start, is_awaited=is_awaited
    )
    is_late = pl.col("is_awaited") & (pl.col("late_ns") > 0) & (pl.col("late_ns") > pl.col("error"))
    instances = late.filter(is_late)["instance"].unique()
    if instances.is_empty():
        return late.filter(is_late).with_columns(
            own_late_ns=pl.col("late_ns"), reason=pl.lit(None, pl.String)
        )
    compared = _add_previous(late).filter(pl.col("instance").is_in(instances.implode()))
    usual = (
        compared.filter(start == pl.col("usual_start"))
        .sort("instance", "rank")
        .group_by("instance", maintain_order=True)
        .agg(pl.col("rank", "start", "own_start", "left").first())
    )
    pairs = compared.filter(is_late).join(usual, on="instance", suffix="_usual", maintain_order="left")
    # Both are compared since the earlier of the two left; without a time of one, since their recordings began.
    both = pl.all_horizontal(pl.col("left", "left_usual").is_not_null())
    pairs = pairs.with_columns(since=pl.when(both).then(pl.min_horizontal("left", "left_usual")))
    for suffix in ("", "_usual"):
        pairs = _add_work(pairs, suffix, waits, job)
    return _split_lateness(pairs).select(*parts.columns, "late_ns", "own_late_ns", "reason")


def _add_previous(parts: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``left``: when the rank completed its previous communication with the same ranks (ns); null if
    none."""
    ends = pl.col("rank").min().over("instance"), pl.col("rank").max().over("instance")
    pair = pl.when(pl.col("collective") == "message").then(pl.concat_str(*ends, separator="-"))
    same = ("rank", "where", "peers")
    parts = parts.with_columns(peers=pl.concat_str("group", pair, separator=" ", ignore_nulls=True))
    completed = parts.select(*same, left="end").sort("left")
    return parts.sort("start").join_asof(
        completed, left_on="start", right_on="left", by=same, coalesce=False, check_sortedness=False
    )


def _add_work(pairs: pl.DataFrame, suffix: str, waits: Mapping[int, Intervals], job: Job) -> pl.DataFrame:
    """Add the times (ns) that the late rank, or the median rank (suffix _usual), computed, worked and waited before its
    arrival.

    Columns: begin (of the recording), compute, busy, waited.

    The work is that since ``since``, or the start of the recording, until the arrival.
    """
    groups = group_rows(pairs[f"rank{suffix}"].to_numpy())
    pairs = take_rows(pairs, np.concatenate(groups))
    ranks, untils = pairs[f"rank{suffix}"].to_numpy(), pairs[f"own_start{suffix}"].to_numpy()
    to_own = untils - pairs[f"start{suffix}"].to_numpy()
    is_known, sinces = is_present(pairs["since"]), to_array(pairs["since"], 0) + to_own
    columns = {name: np.zeros(pairs.height, np.int64) for name in ("begin", "compute", "busy", "waited")}
    end = 0
    for size in map(len, groups):
        rows, end = slice(end, end + size), end + size
        rank = int(ranks[rows.start])
        work, begin = compute_activity(job[rank]), find_first_time(job[rank])
        until = untils[rows]
        since = np.minimum(np.where(is_known[rows], sinces[rows], begin), until)
        blocked = waits.get(rank, EMPTY) - work.times["computation"]
        columns["begin"][rows] = begin - to_own[rows]
        columns["compute"][rows] = work.times["computation"].covered(since, until)
        columns["busy"][rows] = work.busy.covered(since, until)
        columns["waited"][rows] = blocked.covered(since, until)
    return pairs.hstack([pl.Series(f"{name}{suffix}", values) for name, values in columns.items()])


def _split_lateness(compared: pl.DataFrame) -> pl.DataFrame:
    """Add own_late_ns (lateness that the rank caused itself) and its reason, by comparison with the median rank."""

    def more(name: str) -> pl.Expr:
        return pl.col(name) - pl.col(f"{name}_usual")

    late = pl.min_horizontal("late_ns", pl.col("start") - pl.col("begin"))
    own_late = (late - more("waited").clip(0)).clip(0)
    computed = more("compute").clip(0)
    other = (more("busy") - more("compute") - more("waited")).clip(0)
    idle = own_late - computed - other
    began_later = 2 * more("begin") > own_late
    idle_reason = (
        pl.when(pl.col("since").is_not_null())
        .then(pl.lit("late_launch"))
        .when(began_later)
        .then(pl.lit("later_recording"))
        .otherwise(pl.lit("late_first"))
    )
    reason = (
        pl.when((computed >= other) & (computed >= idle))
        .then(pl.lit("longer_compute"))
        .when(other >= idle)
        .then(pl.lit("other_work"))
        .otherwise(idle_reason)
    )
    return compared.with_columns(own_late_ns=own_late, reason=reason).with_columns(late_ns=late)
