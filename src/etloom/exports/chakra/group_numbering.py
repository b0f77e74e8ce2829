"""Number the process groups of a job as ASTRA-sim expects: each group has a number and a list of ranks.

All ranks are 0, but only in a job without other groups. ASTRA-sim counts the streams of group 0 together with those of
all other groups, so that after a collective of some ranks the tags of the next one of all ranks differ, and it never
ends (Sys.cc, stream_id = num_streams++). Next to other groups, all ranks are therefore a group with a number, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import polars as pl

from etloom.core.trace import Job, Trace

WORLD = 0
_MAX_NUMBER = 2**31 - 1  # limit of simulators; a memory address used as a name is greater

GroupKey = tuple[str | None, str | None]
"""Name and JSON list of ranks. Ranks may use one name for different groups (`list_group_keys`)."""


@dataclass(frozen=True)
class GroupNumbers:
    """The numbers of the process groups of a job, and the ranks of each number.

    Attributes:
        number: Key of a group -> its number.
        ranks: Number -> ranks, for all numbers but 0.
        event_numbers: (rank, event id) -> number, for communications without a group.
        default: Number of all ranks, for collectives of an unknown group; None where there are no other groups.
    """

    number: dict[GroupKey, int]
    ranks: dict[int, list[int]]
    event_numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    default: int | None = None


def number_groups(traces: Iterable[Trace]) -> GroupNumbers:
    """Number those process groups of a job's traces whose member ranks are known.

    The group of all ranks is 0. A name that is a number becomes the number; the other groups get the next free numbers
    in the order of their ranks and names, so that files of one job that are written separately agree on the groups they
    share.
    """
    ranks: dict[GroupKey, list[int]] = {}
    world: set[GroupKey] = set()
    for trace in traces:
        _collect_groups(trace, ranks, world)
    number = dict.fromkeys(world, WORLD)
    number_ranks: dict[int, list[int]] = {}
    unnumbered = []
    for key, members in ranks.items():
        if key in world or not members:
            continue
        name = int(key[0]) if key[0] is not None and key[0].isdecimal() else None
        if name and name <= _MAX_NUMBER and number_ranks.get(name, members) == members:
            number[key], number_ranks[name] = name, members
        else:
            unnumbered.append(key)
    for key in sorted(unnumbered, key=lambda key: (ranks[key], key[0] or "", key[1] or "")):
        equal = [other for other in number if other[0] == key[0] and ranks[other] == ranks[key]]
        number[key] = number[equal[0]] if equal else max(WORLD, *number_ranks, 0) + 1
        number_ranks[number[key]] = ranks[key]
    return GroupNumbers(number, dict(sorted(number_ranks.items())))


def _collect_groups(trace: Trace, ranks: dict[GroupKey, list[int]], world: set[GroupKey]) -> None:
    """Add a trace's process groups and their members to ``ranks``, and groups that contain all ranks to ``world``."""
    world_size = trace.meta.get("world_size")
    for name, description, text in _list_declared(trace):
        ranks[name, text] = _parse_ranks(text)
        if description == "default_pg":
            world.add((name, text))
    for key in list_group_keys(trace).values():
        if key != (None, None):
            ranks.setdefault(key, _parse_ranks(key[1]))
    for key, members in ranks.items():
        is_all = bool(members) and len(members) == world_size and members == list(range(len(members)))
        if key[0] == "0" or is_all:
            world.add(key)


def list_group_keys(trace: Trace) -> dict[GroupKey, GroupKey]:
    """Return the key of the group of each communication of a rank: (name, ranks) in `comms` -> the key.

    A communication without ranks is in the group of its name that its rank declares: another rank may use the name for
    another group.
    """
    declared = {name: text for name, _, text in _list_declared(trace)}
    keys = trace.comms.select("pg_name", "ranks").unique().cast(pl.String).iter_rows()
    return {(name, text): (name, text or declared.get(name)) for name, text in keys}


def _list_declared(trace: Trace) -> list[tuple[str | None, str | None, str | None]]:
    """Return name, description and ranks of the groups that a rank declares."""
    return trace.groups.select("pg_name", "pg_desc", "ranks").cast(pl.String).rows()


def add_matched_groups(job: Job, groups: GroupNumbers, parts: pl.DataFrame) -> GroupNumbers:
    """Add process groups for communications recorded without group (gloo's); the members are the ranks that took part.

    Requires the traces of all ranks, because a missing one might have taken part.

    parts: `MatchedCollectives.parts` of the job.
    """
    if any(int(trace.meta.get("world_size") or len(job)) > len(job) for trace in job.values()):
        return groups
    parts = parts.filter(pl.col("group").is_null() & (pl.col("collective") != "message"))
    numbers = {tuple(ranks): number for number, ranks in groups.ranks.items()}
    numbers[tuple(sorted(job))] = WORLD
    event_numbers: dict[tuple[int, int], int] = {}
    for _, instance in parts.drop_nulls("instance").group_by("instance", maintain_order=True):
        ranks = tuple(sorted(instance["rank"].unique()))
        number = numbers.setdefault(ranks, max(numbers.values()) + 1)
        event_numbers |= dict.fromkeys(instance.select("rank", "event").iter_rows(), number)
    added = {number: list(ranks) for ranks, number in numbers.items() if number != WORLD}
    return replace(groups, ranks=groups.ranks | added, event_numbers=event_numbers)


def number_world(groups: GroupNumbers, world_size: int) -> GroupNumbers:
    """Change the number of the group of all ranks from 0 to the next free number, if there are other groups."""
    if not groups.ranks:
        return groups
    world = max(groups.ranks) + 1
    return GroupNumbers(
        {key: number or world for key, number in groups.number.items()},
        {**groups.ranks, world: list(range(world_size))},
        {key: number or world for key, number in groups.event_numbers.items()},
        default=world,
    )


def _parse_ranks(text: str | None) -> list[int]:
    """Parse a JSON list of ranks and sort it; an empty list if it is null or not a list of integers."""
    ranks = None if text is None else json.loads(text)
    return sorted(ranks) if isinstance(ranks, list) and all(type(rank) is int for rank in ranks) else []
