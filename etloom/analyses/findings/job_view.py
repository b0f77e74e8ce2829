"""Access to the data of each rank of a job for the finding patterns; a few ranks are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial

import polars as pl

from etloom.analyses.findings.late_arrivals import find_late_arrivals
from etloom.analyses.findings.rank_findings import find_in_rank
from etloom.analyses.findings.rank_view import RankView
from etloom.collectives import match_collectives
from etloom.core.intervals import EMPTY, Intervals
from etloom.core.trace import Job

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
