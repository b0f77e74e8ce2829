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

from etloom import collectives
from etloom.collectives.matching import get_roles
from etloom.core import categories
from etloom.core.trace import Trace
from etloom.graphs.algorithms import EdgeKind, Int32Array, Int64Array, PointRole
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays, Mask
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.host_threads import HostThreads


@dataclass(eq=False)
class AsyncRanges:
    """Host ranges that end on another thread: ``row`` and ``ids`` of the events; when each begins, with the operator
    that issued it, and ends, and the points of that; the ``floor`` between them."""

    row: Int64Array
    ids: Int32Array
    start: Int64Array
    end: Int64Array
    begin: Int32Array
    finish: Int32Array
    floor: Int64Array

    def edges(self, draft: GraphDraft) -> None:
        """Add the pieces from begin to finish to the draft."""
        draft.edges(EdgeKind.COMPLETE, self.begin, self.finish, self.floor, self.ids)


def find_participations(trace: Trace, events: EventArrays, rank: int, others: bool) -> pl.DataFrame | None:
    """`collectives.parts` of a rank; None where no one asks: there are no ``others`` and no ranges."""
    return collectives.list_participations(trace, rank) if others or _is_async(events).any() else None


def count_gpu_communications(events: EventArrays, work: GpuActivities) -> int:
    """How many communications of the device there are."""
    moves = events.names.asked(
        lambda name: categories.kernel_type(pl.lit("kernel"), name) == "communication"
    )[work.row]
    return int(
        (
            moves & ~events.cats.among(categories.MEMCPY_CATEGORIES | categories.MEMSET_CATEGORIES)[work.row]
        ).sum()
    )


def add_async_ranges(
    draft: GraphDraft, events: EventArrays, built: HostThreads, found: pl.DataFrame | None, rank: int
) -> AsyncRanges:
    """The host ranges of a rank that end on another thread, each begun by the operator that issued it or, where that
    is not known, by what was open on its thread."""
    row = np.flatnonzero(_is_async(events))
    issuer = _find_enclosing_rows(events, built, row)
    if found is not None:
        called = found.filter(pl.col("issuer").is_not_null() & (pl.col("where") == "host"))
        named = np.full(len(events), -1, np.int64)
        named[events.rows(called["event"])] = events.rows(called["issuer"])
        issuer = np.where(named[row] >= 0, named[row], issuer)
    at = np.where(issuer >= 0, built.start[issuer], -1) if len(row) else issuer
    issued = at >= 0
    ids, own, end = events.id[row], events.start[row], events.end[row]
    opens = draft.points(own, ids, PointRole.START, rank)
    begin, start = opens.copy(), own.copy()
    begin[issued], start[issued] = built.base + at[issued], built.time[at[issued]]
    draft.edges(EdgeKind.COMPLETE, begin[issued], opens[issued], (own - start)[issued], ids[issued])
    finish = draft.points(end, ids, PointRole.END, rank)
    return AsyncRanges(row, ids, start, end, begin, finish, end - start)


def add_range_waits(draft: GraphDraft, built: HostThreads, gaps: Int64Array, off: AsyncRanges) -> int:
    """Rests in which a range ends: the last to end is taken for what ended the rest. Returns how many."""
    order = np.argsort(off.end, kind="stable")
    last = np.searchsorted(off.end[order], built.time[gaps], side="right") - 1
    ok = last >= 0
    ok[ok] = off.end[order][last[ok]] >= built.time[gaps[ok] - 1]
    gaps, ended = gaps[ok], order[last[ok]]
    built.waits(gaps, 0)
    draft.edges(EdgeKind.RETURN, off.finish[ended], built.base + gaps, 0, off.ids[ended])
    return len(gaps)


def locate_participations(
    found: pl.DataFrame, events: EventArrays, work: GpuActivities, off: AsyncRanges
) -> pl.DataFrame:
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


def add_collective_edges(
    draft: GraphDraft, found: pl.DataFrame, floors: Mapping[tuple[int, str], Int64Array]
) -> pl.DataFrame:
    """Add arrival and transfer where parts (`placed`) of several ranks meet. Returns rank, matched, local: how many
    parts met others' and how many stay on their own.

    floors: by rank and where ("host", "device") those of the pieces from start to end, which are lowered.
    """
    named = collectives.match_participations(found).select("rank", "event", "meeting")
    table = _check_instances(found.join(named, on=("rank", "event"), maintain_order="left"))
    met = table.filter("believed").sort("meeting", "rank", "start", maintain_order=True)
    meetings = met.group_by("meeting", maintain_order=True).agg(
        pl.col("arrival").first(),
        least=pl.when(pl.all_horizontal(pl.col("sends", "receives").all()))
        .then((pl.col("end") - pl.col("start")).min())
        .otherwise(0),
    )
    points = draft.points(meetings["arrival"], -1, PointRole.ARRIVE, -1)
    met = met.join(meetings.select("meeting", "least", point=points), on="meeting", maintain_order="left")
    come, go = met.filter("sends"), met.filter("receives")
    draft.edges(EdgeKind.ARRIVAL, come["begin"], come["point"], 0, come["event"])
    kind = np.where((go["collective"] == "message").fill_null(False), EdgeKind.MESSAGE, EdgeKind.TRANSFER)
    draft.edges(kind, go["point"], go["finish"], (go["end"] - go["arrival"]).clip(0), go["event"])
    for (rank, where), own in go.partition_by("rank", "where", as_dict=True).items():
        floors[rank, where][own["place"].to_numpy()] = own["least"].to_numpy()
    return table.group_by("rank").agg(matched=pl.col("believed").sum(), local=(~pl.col("believed")).sum())


def _check_instances(parts: pl.DataFrame) -> pl.DataFrame:
    """The parts with meeting, what they do in it (``sends``: others cannot end before it starts; ``receives``: it
    cannot end before those start), its ``arrival`` and whether times allow it."""
    both = [
        get_roles(*row)
        for row in parts.select("rank", "source", "root", "collective").iter_rows()
    ]
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


def _is_async(events: EventArrays) -> Mask:
    return events.host & (events.depth < 0)


def _find_enclosing_rows(events: EventArrays, built: HostThreads, row: Int64Array) -> Int64Array:
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
