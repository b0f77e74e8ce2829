"""Process groups by number, as ASTRA-sim knows them: 0 is all ranks, others have a number and a list of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import polars as pl

from etloom.collectives import match_collectives
from etloom.core.trace import Job, Trace

WORLD = 0
_MAX_NUMBER = 2**31 - 1  # that simulators read; an address in place of a name is greater

GroupKey = tuple[str | None, str | None]
"""What communications and groups bear: a name and a JSON list of ranks."""


@dataclass(frozen=True)
class GroupNumbers:
    """The ``number`` of each group, and the ``ranks`` of each number but 0. ``met``: by (rank, event) the number of the
    group of a communication of which only that is known."""

    number: dict[GroupKey, int]
    ranks: dict[int, list[int]]
    met: dict[tuple[int, int], int] = field(default_factory=dict)


def number_groups(traces: Iterable[Trace]) -> GroupNumbers:
    """The groups of all ranks whose members are known. A name that is a number stays; all ranks are 0; the rest get
    the next free numbers.

    The order of those is that of their ranks and names, so that files of one job that are written apart agree where
    they know the same groups.
    """
    ranks: dict[GroupKey, list[int]] = {}
    world: set[GroupKey] = set()
    for trace in traces:
        world_size = trace.meta.get("world_size")
        members: dict[str | None, str | None] = {}
        declared = trace.groups.select("pg_name", "pg_desc", "ranks").cast(pl.String)
        for name, description, text in declared.iter_rows():
            members[name] = text
            ranks[name, text] = _parse_ranks(text)
            if description == "default_pg":
                world.add((name, text))
        for name, text in trace.comms.select("pg_name", "ranks").unique().cast(pl.String).iter_rows():
            if (name, text) != (None, None):
                ranks.setdefault((name, text), _parse_ranks(text or members.get(name)))
        world |= {
            key
            for key, listed in ranks.items()
            if key[0] == "0" or (listed and len(listed) == world_size and listed == list(range(len(listed))))
        }
    number = dict.fromkeys(world, WORLD)
    known: dict[int, list[int]] = {}
    later = []
    for key, listed in ranks.items():
        if key in world or not listed:
            continue
        own = int(key[0]) if key[0] is not None and key[0].isdecimal() else None
        if own and own <= _MAX_NUMBER and known.get(own, listed) == listed:
            number[key], known[own] = own, listed
        else:
            later.append(key)
    for key in sorted(later, key=lambda one: (ranks[one], one[0] or "", one[1] or "")):
        alike = [other for other in number if other[0] == key[0] and ranks[other] == ranks[key]]
        number[key] = number[alike[0]] if alike else max(WORLD, *known, 0) + 1
        known[number[key]] = ranks[key]
    return GroupNumbers(number, dict(sorted(known.items())))


def add_matched_groups(job: Job, groups: GroupNumbers) -> GroupNumbers:
    """The groups, and those of communications that bear none (gloo's): the ranks that met in them.

    Only where every rank of the run is there, since those that are not may have met the others.
    """
    everyone = sorted(job)
    if len(job) < 2 or any(
        int(trace.meta.get("world_size") or len(job)) > len(job) for trace in job.values()
    ):
        return groups
    parts = match_collectives(job).parts.filter(
        pl.col("group").is_null() & (pl.col("collective") != "message")
    )
    numbers = {tuple(ranks): number for number, ranks in groups.ranks.items()} | {tuple(everyone): WORLD}
    found: dict[tuple[int, int], int] = {}
    for _, own in parts.drop_nulls("meeting").group_by("meeting", maintain_order=True):
        ranks = tuple(sorted(own["rank"].unique()))
        number = numbers.setdefault(ranks, max(numbers.values()) + 1)
        found |= dict.fromkeys(own.select("rank", "event").iter_rows(), number)
    listed = {number: list(ranks) for ranks, number in numbers.items() if number != WORLD}
    return replace(groups, ranks=groups.ranks | listed, met=found)


def _parse_ranks(text: str | None) -> list[int]:
    """The ranks in order; none where they are not known, or are no numbers."""
    found = None if text is None else json.loads(text)
    return sorted(found) if isinstance(found, list) and all(type(one) is int for one in found) else []
