"""The ranks of a job as the patterns see them, few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial

import polars as pl

from etloom.analyses.findings.rank_view import View
from etloom.collectives import match_collectives
from etloom.core.intervals import EMPTY, Intervals
from etloom.core.trace import Job

HELD = 8
"""Views that are kept: what they work out is many times what is found, and patterns go from rank to rank."""


class Views(Mapping[int, View]):
    """The View of each rank of a linked job, the one used longest ago given up for another."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._held: dict[int, View] = {}

    def __getitem__(self, rank: int) -> View:
        view = self._held.pop(rank, None) or View(self.job[rank], partial(self._awaiting, rank))
        self._held[rank] = view
        if len(self._held) > HELD:
            del self._held[next(iter(self._held))]
        return view

    def __iter__(self) -> Iterator[int]:
        return iter(self.job)

    def __len__(self) -> int:
        return len(self.job)

    def _awaiting(self, rank: int) -> Intervals:
        return self._waits.get(rank, EMPTY)

    @cached_property
    def _waits(self) -> dict[int, Intervals]:
        """When each rank stood in communications waiting for others, on its own clock."""
        if len(self) < 2:
            return {}
        waited = match_collectives(self.job).comparable.filter(pl.col("wait") > pl.col("error"))
        # A wait is told on the common clock, of which a second may be longer than of the rank's own.
        waited = waited.with_columns(until=pl.min_horizontal(pl.col("own_start") + pl.col("wait"), "own_end"))
        return {
            rank: Intervals.of(own["own_start"], own["until"]) for (rank,), own in waited.group_by("rank")
        }
