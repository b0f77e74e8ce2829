"""The views of a job's ranks, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial

import polars as pl

from etloom.analyses.findings.rank_view import RankView
from etloom.collectives import match_collectives
from etloom.core.intervals import EMPTY, Intervals
from etloom.core.trace import Job

CACHED_VIEWS = 8
"""Number of cached views: their derived tables are much larger than the findings, and patterns iterate over ranks."""


class JobView(Mapping[int, RankView]):
    """Maps each rank of a linked job to its view; the least recently used views are discarded."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._cache: dict[int, RankView] = {}

    def __getitem__(self, rank: int) -> RankView:
        view = self._cache.pop(rank, None) or RankView(self.job[rank], partial(self._find_waits, rank))
        self._cache[rank] = view
        if len(self._cache) > CACHED_VIEWS:
            del self._cache[next(iter(self._cache))]
        return view

    def __iter__(self) -> Iterator[int]:
        return iter(self.job)

    def __len__(self) -> int:
        return len(self.job)

    def _find_waits(self, rank: int) -> Intervals:
        return self._waits.get(rank, EMPTY)

    @cached_property
    def _waits(self) -> dict[int, Intervals]:
        """Return when each rank was blocked in communications waiting for others, on its own clock."""
        if len(self) < 2:
            return {}
        waits = match_collectives(self.job).comparable.filter(pl.col("wait") > pl.col("error"))
        # Waits are measured on the common clock, which may run faster than the rank's own.
        waits = waits.with_columns(until=pl.min_horizontal(pl.col("own_start") + pl.col("wait"), "own_end"))
        return {
            rank: Intervals.of(rank_waits["own_start"], rank_waits["until"])
            for (rank,), rank_waits in waits.group_by("rank")
        }
