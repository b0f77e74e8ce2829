"""What ranks do together: all arrive, then the data moves.

A member is a collective's kernel on a device, or a backend's range of one on the host (gloo:all_reduce), which
ends on another thread. Members meet by process group and sequence number where the recording has them, else by
the order in which each rank performs the collectives of a name in a group, as far as they overlap in time. Where
too many are left alone, the ranks that were recorded are not those that met, and each stays on its own.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from etloom import kinds, stacks
from etloom.dependencies.devices import Devices
from etloom.dependencies.draft import Draft
from etloom.dependencies.hosts import WAITS, Hosts
from etloom.dependencies.threads import rests
from etloom.graphs import Kind, Numbers, Role, Ticks
from etloom.trace import Trace

STRANGERS = 0.1
"""Where more of the communications of a name than this share meet nobody, the others met by chance."""


@dataclass(frozen=True)
class Member:
    """One rank's part of a communication.

    ``start``, ``end``: times; ``begin``, ``finish``: points. ``event``: id. ``floors[place]``: what its piece from
    start to end takes at least. ``where`` ("host", "device") and ``name`` of the communication, its ``group`` and
    ``seq`` in it, None where it is not known. ``peers``: of a send or receive (source, destination). ``sends``:
    others cannot end before it starts. ``receives``: it cannot end before those start.
    """

    rank: int
    start: int
    end: int
    begin: int
    finish: int
    event: int
    floors: Ticks
    place: int
    where: str
    name: str | None
    group: Any
    seq: int | None
    peers: tuple[int, int] | None = None
    sends: bool = True
    receives: bool = True

    @property
    def order(self) -> tuple[Any, ...]:
        return self.where, self.name, self.group

    @property
    def latest(self) -> float:
        """When it is there for the others."""
        return self.start if self.sends else -math.inf

    @property
    def earliest(self) -> float:
        """When it has got what the others bring."""
        return self.end if self.receives else math.inf


@dataclass(eq=False)
class Ranges:
    """Host ranges that end on another thread: ``row`` and ``ids`` of the events, ``issuer`` (row, -1 for none),
    times, the points at which each begins and ends, and the ``floor`` between them."""

    row: Ticks
    ids: Ticks
    issuer: Ticks
    start: Ticks
    end: Ticks
    begin: Numbers
    finish: Numbers
    floor: Ticks

    def edges(self, draft: Draft) -> None:
        """Add the pieces from begin to finish to the draft."""
        draft.edges(Kind.COMPLETE, self.begin, self.finish, self.floor, self.ids)


def members(trace: Trace, work: Devices, off: Ranges, rank: int) -> list[Member]:
    """The communications of a rank."""
    return _on_device(trace, work, rank) + _on_host(trace, off, rank)


def meet(draft: Draft, found: list[Member], counts: Mapping[int, dict[str, int]]) -> None:
    """Add arrival and transfer where members of several ranks meet; the others stay on their own."""
    for own in counts.values():
        own |= {"matched_communications": 0, "local_communications": 0}
    for meetings in _meetings(_same_groups(found)):
        alone = sum(len(meeting) == 1 for meeting in meetings)
        total = sum(len(meeting) for meeting in meetings)
        believed = meetings[0][0].seq is not None or alone <= STRANGERS * total
        for meeting in meetings:
            together = believed and len(meeting) > 1
            for member in meeting:
                counts[member.rank]["matched_communications" if together else "local_communications"] += 1
            if together:
                _join(draft, meeting)


def _same_groups(found: list[Member]) -> list[Member]:
    """The members with one name for each group on all ranks.

    Some recorders name a group by an address, which is another on every rank: such names are taken in the order in
    which each rank first uses them.
    """
    ranks: dict[Any, set[int]] = defaultdict(set)
    for member in found:
        ranks[member.group].add(member.rank)
    used: dict[int, list[Any]] = defaultdict(list)
    for member in sorted(found, key=lambda m: (m.start, m.event)):
        if len(ranks[member.group]) == 1 and member.group not in used[member.rank]:
            used[member.rank].append(member.group)
    return [
        replace(member, group=("turn", used[member.rank].index(member.group)))
        if len(ranks[member.group]) == 1
        else member
        for member in found
    ]


def _meetings(found: list[Member]) -> list[list[list[Member]]]:
    """Lists of meetings that share a key, known by number or told from order and time: believed together or not."""
    by_order: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
    for member in found:
        by_order[(*member.order, member.peers, member.seq is None)].append(member)
    return [_by_number(own) if own[0].seq is not None else _by_time(own) for own in by_order.values()]


def _by_number(own: list[Member]) -> list[list[Member]]:
    """Members of one sequence number meet, where the last came before the first left."""
    numbered: dict[int | None, list[Member]] = defaultdict(list)
    for member in own:
        numbered[member.seq].append(member)
    meetings = []
    for members in numbered.values():
        once = len({member.rank for member in members}) == len(members)
        overlap = max(member.latest for member in members) <= min(member.earliest for member in members)
        meetings += [members] if once and overlap else [[member] for member in members]
    return meetings


def _by_time(own: list[Member]) -> list[list[Member]]:
    """Of the next communications of all ranks, those meet that came before the first of them to leave left.

    So ranks of several groups that go by one name meet with their own.
    """
    waiting: dict[int, deque[Member]] = defaultdict(deque)
    for member in sorted(own, key=lambda m: (m.start, m.event)):
        waiting[member.rank].append(member)
    meetings = []
    while waiting:
        heads = [queue[0] for queue in waiting.values()]
        left = min(head.earliest for head in heads)
        meeting = [head for head in heads if head.latest <= left]
        meetings.append(meeting)
        for member in meeting:
            waiting[member.rank].popleft()
            if not waiting[member.rank]:
                del waiting[member.rank]
    return meetings


def _join(draft: Draft, meeting: list[Member]) -> None:
    """The point at which the last one has come, the edges to it and from it to the ends."""
    senders = [member for member in meeting if member.sends]
    receivers = [member for member in meeting if member.receives]
    arrival = max(member.start for member in senders or meeting)
    (point,) = draft.points([arrival], -1, Role.ARRIVE, -1)
    for member in senders:
        draft.edges(Kind.ARRIVAL, [member.begin], [point], 0, member.event)
    everyone = len(senders) == len(receivers) == len(meeting)
    least = min(member.end - member.start for member in meeting) if everyone else 0
    for member in receivers:
        member.floors[member.place] = least
        kind = Kind.TRANSFER if member.peers is None else Kind.MESSAGE
        draft.edges(kind, [point], [member.finish], max(0, member.end - arrival), member.event)


def _on_device(trace: Trace, work: Devices, rank: int) -> list[Member]:
    events = trace.events
    described = kinds.with_kind(events.select("id", "cat", "name")[work.row.astype(np.int64)])
    is_communication = (described["kind"] == "communication").fill_null(False).to_numpy()
    places = np.flatnonzero(is_communication)
    own = described.filter(is_communication)
    facts = _facts(trace)
    found = []
    for place, event, called in zip(places.tolist(), own["id"], own["name"].cast(pl.String), strict=True):
        fact = facts.get(event, {})
        name = fact.get("collective") or kinds.collective(called)
        found.append(
            Member(
                rank,
                int(work.start[place]),
                int(work.end[place]),
                int(work.begin[place]),
                int(work.finish[place]),
                event,
                work.floor,
                place,
                "device",
                name,
                _group(fact),
                fact.get("seq"),
            )
        )
    return found


def _facts(trace: Trace) -> dict[int, dict[str, Any]]:
    """What is known of the communication of an event, by its id."""
    table = trace.comms.drop_nulls("event").select(
        "event", pl.col("collective", "pg_name", "ranks").cast(pl.String), "seq", "peer", "root"
    )
    return {row["event"]: row for row in table.iter_rows(named=True)}


def _group(fact: dict[str, Any]) -> Any:
    """What a group is known by: its ranks and its name, as far as they were recorded."""
    known = fact.get("pg_name"), fact.get("ranks")
    return None if known == (None, None) else known


def ranges(draft: Draft, trace: Trace, built: Hosts, rank: int) -> Ranges:
    """The host ranges of a rank that end on another thread, each begun by the operator that issued it."""
    events = trace.events
    off = stacks.among(events["cat"], kinds.HOST) & events["depth"].is_null().to_numpy()
    off &= events["dur"].is_not_null().to_numpy()
    row = np.flatnonzero(off)
    starts = events["ts"].to_numpy()[row]
    end = starts + np.maximum(events["dur"].fill_null(0).to_numpy()[row], 0)
    ids = events["id"].to_numpy()[row].astype(np.int64)
    issuer = _issuers(trace, built, row)
    begin = np.full(len(row), -1, np.int32)
    start = starts.copy()
    issued = issuer >= 0
    places = built.start[issuer[issued]]
    begin[issued], start[issued] = built.point[places], built.time[places]
    own = draft.points(starts, ids, Role.START, rank)
    begin[~issued] = own[~issued]
    draft.edges(Kind.COMPLETE, begin[issued], own[issued], starts[issued] - start[issued], ids[issued])
    finish = draft.points(end, ids, Role.END, rank)
    return Ranges(row, ids, issuer, start, end, begin, finish, end - start)


def await_ranges(draft: Draft, built: Hosts, still: np.ndarray, off: Ranges) -> int:
    """Rests in which a range ends: the last to end is taken for what ended the rest. Returns how many."""
    order = np.argsort(off.end, kind="stable")
    gaps = rests(built, still)
    last = np.searchsorted(off.end[order], built.time[gaps], side="right") - 1
    ok = last >= 0
    ok[ok] = off.end[order][last[ok]] >= built.time[gaps[ok] - 1]
    gaps, ended = gaps[ok], order[last[ok]]
    built.waits(gaps, 0)
    draft.edges(Kind.RETURN, off.finish[ended], built.point[gaps], 0, off.ids[ended])
    return len(gaps)


def _issuers(trace: Trace, built: Hosts, row: Ticks) -> Ticks:
    """The row of the communication operator that began last before each range, -1 where there is none."""
    events = trace.events
    calls = stacks.among(events["cat"], kinds.OPERATORS) & (built.start >= 0)
    calls &= stacks.asked(events["name"], kinds.is_communication)
    calls &= ~stacks.asked(events["name"], lambda name: name.str.contains(WAITS))
    pids = events["pid"].fill_null(0).to_numpy()
    starts = events["ts"].to_numpy()
    issuer = np.full(len(row), -1, np.int64)
    for pid in np.unique(pids[row]):
        own, ranged = np.flatnonzero(calls & (pids == pid)), np.flatnonzero(pids[row] == pid)
        at = np.searchsorted(starts[own], starts[row[ranged]], side="right") - 1
        issuer[ranged[at >= 0]] = own[at[at >= 0]]
    return issuer


def _on_host(trace: Trace, off: Ranges, rank: int) -> list[Member]:
    facts = _facts(trace)
    ids = trace.events["id"].to_numpy()
    found = []
    for at, name in enumerate(trace.events["name"][off.row].cast(pl.String)):
        collective = kinds.collective(name)
        fact = facts.get(int(ids[off.issuer[at]]), {}) if off.issuer[at] >= 0 else {}
        peers, sends, receives, peer, root = None, True, True, fact.get("peer"), fact.get("root")
        if collective in ("send", "recv") and peer is not None:
            # Both end after both have come: gloo and NCCL move nothing before there is a place for it.
            peers = (peer, rank) if collective == "recv" else (rank, peer)
            collective = "message"
        elif collective in ("broadcast", "scatter") and root is not None:
            sends, receives = rank == root, rank != root
        elif collective in ("reduce", "gather") and root is not None:
            receives = rank == root
        elif collective in (None, "send", "recv"):
            continue
        found.append(
            Member(
                rank,
                int(off.start[at]),
                int(off.end[at]),
                int(off.begin[at]),
                int(off.finish[at]),
                int(off.ids[at]),
                off.floor,
                at,
                "host",
                collective,
                _group(fact),
                fact.get("seq"),
                peers,
                sends,
                receives,
            )
        )
    return found
