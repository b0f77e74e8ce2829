"""What ranks do together: all arrive, then the data moves.

Who meets whom says `etloom.collectives`. A meeting is believed where the last one to be awaited came before the first
one that awaited it left; the others stay on their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom import collectives, kinds
from etloom.collectives.meetings import roles
from etloom.dependencies.devices import Devices
from etloom.dependencies.draft import Draft
from etloom.dependencies.events import Events, Mask
from etloom.dependencies.hosts import Hosts
from etloom.graphs import Kind, Numbers, Role, Ticks
from etloom.trace import Trace


@dataclass(eq=False)
class Ranges:
    """Host ranges that end on another thread: ``row`` and ``ids`` of the events; when each begins, with the operator
    that issued it, and ends, and the points of that; the ``floor`` between them."""

    row: Ticks
    ids: Numbers
    start: Ticks
    end: Ticks
    begin: Numbers
    finish: Numbers
    floor: Ticks

    def edges(self, draft: Draft) -> None:
        """Add the pieces from begin to finish to the draft."""
        draft.edges(Kind.COMPLETE, self.begin, self.finish, self.floor, self.ids)


def parts(trace: Trace, events: Events, rank: int, others: bool) -> pl.DataFrame | None:
    """`collectives.parts` of a rank; None where no one asks: there are no ``others`` and no ranges."""
    return collectives.parts(trace, rank) if others or _off(events).any() else None


def communications(events: Events, work: Devices) -> int:
    """How many communications of the device there are."""
    moves = events.names.asked(lambda name: kinds.kind(pl.lit("kernel"), name) == "communication")[work.row]
    return int((moves & ~events.cats.among(kinds.COPIES | kinds.SETS)[work.row]).sum())


def ranges(draft: Draft, events: Events, built: Hosts, found: pl.DataFrame | None, rank: int) -> Ranges:
    """The host ranges of a rank that end on another thread, each begun by the operator that issued it or, where that
    is not known, by what was open on its thread."""
    row = np.flatnonzero(_off(events))
    issuer = _open_around(events, built, row)
    if found is not None:
        called = found.filter(pl.col("issuer").is_not_null() & (pl.col("where") == "host"))
        named = np.full(len(events), -1, np.int64)
        named[events.rows(called["event"])] = events.rows(called["issuer"])
        issuer = np.where(named[row] >= 0, named[row], issuer)
    at = np.where(issuer >= 0, built.start[issuer], -1) if len(row) else issuer
    issued = at >= 0
    ids, own, end = events.id[row], events.start[row], events.end[row]
    opens = draft.points(own, ids, Role.START, rank)
    begin, start = opens.copy(), own.copy()
    begin[issued], start[issued] = built.base + at[issued], built.time[at[issued]]
    draft.edges(Kind.COMPLETE, begin[issued], opens[issued], (own - start)[issued], ids[issued])
    finish = draft.points(end, ids, Role.END, rank)
    return Ranges(row, ids, start, end, begin, finish, end - start)


def await_ranges(draft: Draft, built: Hosts, gaps: Ticks, off: Ranges) -> int:
    """Rests in which a range ends: the last to end is taken for what ended the rest. Returns how many."""
    order = np.argsort(off.end, kind="stable")
    last = np.searchsorted(off.end[order], built.time[gaps], side="right") - 1
    ok = last >= 0
    ok[ok] = off.end[order][last[ok]] >= built.time[gaps[ok] - 1]
    gaps, ended = gaps[ok], order[last[ok]]
    built.waits(gaps, 0)
    draft.edges(Kind.RETURN, off.finish[ended], built.base + gaps, 0, off.ids[ended])
    return len(gaps)


def placed(found: pl.DataFrame, events: Events, work: Devices, off: Ranges) -> pl.DataFrame:
    """The parts of a rank that have points: ``begin`` and ``finish``, at ``start`` and ``end``; ``place`` of the floor
    between them in that of `work` or `off`."""
    row = events.rows(found["event"])
    ranged = np.full(len(events), -1, np.int64)
    ranged[off.row] = np.arange(len(off.row))
    frames = []
    for where, own, place in (("device", work, work.place[row]), ("host", off, ranged[row])):
        has = place >= 0
        place = place[has].astype(np.int64)
        frames.append(
            found.filter(has).with_columns(
                where=pl.lit(where),
                place=place,
                start=own.start[place],
                end=own.end[place],
                begin=own.begin[place],
                finish=own.finish[place],
            )
        )
    return pl.concat(frames)


def meet(draft: Draft, found: pl.DataFrame, floors: Mapping[tuple[int, str], Ticks]) -> pl.DataFrame:
    """Add arrival and transfer where parts (`placed`) of several ranks meet. Returns rank, matched, local: how many
    parts met others' and how many stay on their own.

    floors: by rank and where ("host", "device") those of the pieces from start to end, which are lowered.
    """
    named = collectives.meet(found).select("rank", "event", "meeting")
    table = _believed(found.join(named, on=("rank", "event"), maintain_order="left"))
    met = table.filter("believed").sort("meeting", "rank", "start", maintain_order=True)
    meetings = met.group_by("meeting", maintain_order=True).agg(
        pl.col("arrival").first(),
        least=pl.when(pl.all_horizontal(pl.col("sends", "receives").all()))
        .then((pl.col("end") - pl.col("start")).min())
        .otherwise(0),
    )
    points = draft.points(meetings["arrival"], -1, Role.ARRIVE, -1)
    met = met.join(meetings.select("meeting", "least", point=points), on="meeting", maintain_order="left")
    come, go = met.filter("sends"), met.filter("receives")
    draft.edges(Kind.ARRIVAL, come["begin"], come["point"], 0, come["event"])
    kind = np.where((go["collective"] == "message").fill_null(False), Kind.MESSAGE, Kind.TRANSFER)
    draft.edges(kind, go["point"], go["finish"], (go["end"] - go["arrival"]).clip(0), go["event"])
    for (rank, where), own in go.partition_by("rank", "where", as_dict=True).items():
        floors[rank, where][own["place"].to_numpy()] = own["least"].to_numpy()
    return table.group_by("rank").agg(matched=pl.col("believed").sum(), local=(~pl.col("believed")).sum())


def _believed(parts: pl.DataFrame) -> pl.DataFrame:
    """The parts with meeting, what they do in it (``sends``: others cannot end before it starts; ``receives``: it
    cannot end before those start), its ``arrival`` and whether times allow it."""
    both = [roles(*row) for row in parts.select("rank", "source", "root", "collective").iter_rows()]
    sends, receives = (pl.Series([one[at] for one in both], dtype=pl.Boolean) for at in (0, 1))
    # gloo and NCCL move no message before there is a place for it.
    message = (parts["collective"] == "message").fill_null(False)
    arrival = pl.col("start").filter(pl.col("sends")).max().over("meeting")
    parts = parts.with_columns(sends=sends | message, receives=receives | message).with_columns(
        arrival=pl.coalesce(arrival, pl.col("start").max().over("meeting"))
    )
    leaves = pl.col("end").filter(pl.col("receives")).min().over("meeting")
    fits = (leaves >= pl.col("arrival")).fill_null(True)
    return parts.with_columns(believed=pl.col("meeting").is_not_null() & fits)


def _off(events: Events) -> Mask:
    return events.host & (events.depth < 0)


def _open_around(events: Events, built: Hosts, row: Ticks) -> Ticks:
    """The row of the innermost event open on an event's thread when it begins, negative for none."""
    found = np.full(len(row), -1, np.int64)
    if not len(row):
        return found
    lanes = events.lanes[row]
    bounds = np.append(np.flatnonzero(built.owner == -2), len(built.owner))
    for low, high in itertools.pairwise(bounds):
        own = np.flatnonzero(lanes == events.lanes[built.row[low]])
        after = low + np.searchsorted(built.time[low:high], events.start[row[own]], side="right")
        inside = (after > low) & (after < high)
        found[own[inside]] = built.owner[after[inside]]
    return found
