"""The ranks of a job as the patterns see them, few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from etloom.patterns._view import View
from etloom.trace import Job

HELD = 8
"""Views that are kept: what they work out is many times what is found, and patterns go from rank to rank."""


class Views(Mapping[int, View]):
    """The View of each rank of a linked job, the one used longest ago given up for another."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._held: dict[int, View] = {}

    def __getitem__(self, rank: int) -> View:
        view = self._held.pop(rank, None) or View(self.job[rank])
        self._held[rank] = view
        if len(self._held) > HELD:
            del self._held[next(iter(self._held))]
        return view

    def __iter__(self) -> Iterator[int]:
        return iter(self.job)

    def __len__(self) -> int:
        return len(self.job)
