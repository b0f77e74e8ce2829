"""Differences between the ranks of communicators in a report of NCCL's RAS, with job ranks where they are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from etloom.analyses.hangs.divergences import COLUMNS
from etloom.core.categories import parse_collective
from etloom.core.communicators import (
    STATUS,
    CommunicatorState,
    RankGroup,
    RankPlace,
    RasReport,
)
from etloom.core.text import count_noun, format_ranks

COMMUNICATOR_COLUMNS: dict[str, Any] = {
    "communicator": pl.String,
    "size": pl.Int64,
    "property": pl.String,
    "value": pl.String,
    "count": pl.Int64,
    "ranks": pl.List(pl.Int64),
}
"""One row per communicator, property (status, error, a collective) and value. ranks: ranks with this value, numbered as
in the communicator; null if a text report does not name them."""
_MAX_VALUES = 4
_MAX_JOB_RANKS = 1 << 20


class JobRanks:
    """Converts ranks of communicators to ranks of the job.

    A communicator with as many ranks as the job has GPUs numbers them like the job; a rank of another one is the rank
    with the same process and device. Without such a communicator the ranks of the job are unknown.
    """

    def __init__(self, report: RasReport) -> None:
        self._size = report.gpus
        self._rank_by_place: dict[RankPlace, int] = {}
        self.is_known = report.full_sizes > 0 and (report.gpus or 0) <= _MAX_JOB_RANKS
        for state in report.communicators if self.is_known else ():
            if state.size == self._size:
                for rank, place in state.places.items():
                    self.is_known &= self._rank_by_place.setdefault(place, rank) == rank

    def convert(self, state: CommunicatorState, ranks: Iterable[int] | None) -> tuple[int, ...] | None:
        """Return the ranks of the job for ranks of a communicator; None if one of them is unknown."""
        if ranks is None or not self.is_known:
            return None
        if state.size == self._size:
            return tuple(ranks)
        job_ranks = [self._rank_by_place.get(state.places[rank]) for rank in ranks if rank in state.places]
        certain = [rank for rank in job_ranks if rank is not None]
        return tuple(sorted(certain)) if len(certain) == len(tuple(ranks)) else None

    def name(self, state: CommunicatorState, groups: Iterable[RankGroup]) -> str:
        """Return the ranks of groups as text: ranks of the job, else with the communicator they are ranks of."""
        listed = list(groups)
        ranks, count = join_ranks(listed), sum(group.count for group in listed)
        job_ranks = self.convert(state, ranks)
        if job_ranks is not None:
            return format_ranks(job_ranks)
        text = count_noun(count, "rank") if ranks is None else format_ranks(ranks)
        return f"{text} of {name_communicator(state)}"


@dataclass(frozen=True)
class CountGap:
    """A collective of a communicator that its ranks have launched different numbers of times.

    Attributes:
        state: the communicator.
        collective: its name in NCCL.
        groups: the ranks by number of launches, the most common number first.
    """

    state: CommunicatorState
    collective: str
    groups: tuple[RankGroup, ...]

    @property
    def behind(self) -> list[RankGroup]:
        """The ranks with fewer launches than the most common number; of two equally common ones the higher counts."""
        return [group for group in self.groups if int(group.value) < int(self.groups[0].value)]

    @property
    def ahead(self) -> list[RankGroup]:
        """The ranks with more launches than the most common number."""
        return [group for group in self.groups if int(group.value) > int(self.groups[0].value)]

    def describe(self, names: JobRanks) -> str:
        """Return the number of launches of each group of ranks as text."""
        parts = []
        for group in self.groups[:_MAX_VALUES]:
            ranks = names.convert(self.state, group.ranks) if names.is_known else group.ranks
            ranks = group.ranks if ranks is None else ranks
            owner = count_noun(group.count, "rank") if ranks is None else format_ranks(ranks)
            parts.append(f"{int(group.value):,} on {owner}")
        more = ", ..." if len(self.groups) > _MAX_VALUES else ""
        return f"{self.collective} {', '.join(parts)}{more}"


def name_communicator(state: CommunicatorState) -> str:
    """Return the hash and the size of a communicator as text."""
    size = f" ({count_noun(state.size, 'rank')})" if state.size else ""
    return f"communicator {state.name}{size}"


def join_ranks(groups: Iterable[RankGroup]) -> tuple[int, ...] | None:
    """Return the ranks of all groups, sorted; None if a group is without names."""
    ranks: list[int] = []
    for group in groups:
        if group.ranks is None:
            return None
        ranks += group.ranks
    return tuple(sorted(ranks))


def list_gaps(states: Iterable[CommunicatorState]) -> list[CountGap]:
    """Return the collectives that ranks of a communicator have launched different numbers of times."""
    return [
        CountGap(state, collective, groups)
        for state in states
        for collective, groups in sorted(state.counts.items())
    ]


def build_gap_table(gaps: Iterable[CountGap], names: JobRanks) -> pl.DataFrame:
    """Return the missing calls as a table of hangs (`COLUMNS`): seq is the first number that the ranks lack."""
    rows = []
    for gap in gaps:
        behind, others = join_ranks(gap.behind), gap.groups[0].ranks
        if not gap.behind or behind is None:
            continue
        job_ranks, job_others = names.convert(gap.state, behind), names.convert(gap.state, others)
        is_mapped = job_ranks is not None
        note = "" if is_mapped else "; ranks of the communicator"
        row = {
            "group": gap.state.name,
            "seq": min(int(group.value) for group in gap.behind) + 1,
            "finding": "missing",
            "collective": parse_collective(f"nccl{gap.collective}") or gap.collective,
            "ranks": list(job_ranks if job_ranks is not None else behind),
            "others": list((job_others if is_mapped else others) or ()),
            "detail": gap.describe(names) + note,
        }
        rows.append(dict.fromkeys(COLUMNS) | row)
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def describe_communicators(report: RasReport) -> pl.DataFrame:
    """Return the state of all communicators of a report (`COMMUNICATOR_COLUMNS`), without collectives not launched."""
    rows = [
        (
            state.name,
            state.size,
            name,
            str(group.value),
            group.count,
            None if group.ranks is None else list(group.ranks),
        )
        for state in report.communicators
        for name, groups in sorted(state.groups.items(), key=lambda item: (item[0] != STATUS, item[0]))
        if len(groups) > 1 or groups[0].value != 0
        for group in groups
    ]
    return pl.DataFrame(rows, schema=COMMUNICATOR_COLUMNS, orient="row")
