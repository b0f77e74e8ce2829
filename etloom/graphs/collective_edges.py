"""Add edges between ranks for collectives: every rank arrives, then the data is transferred.

`etloom.collectives` matches the participations. A collective instance is accepted if the last participation that others
wait for starts before the first one that waits for it ends; other participations stay local to their rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom import collectives
from etloom.collectives.matching import get_roles
from etloom.core import categories
from etloom.core.arrays import select_values
from etloom.core.categories import KERNEL_TYPES
from etloom.core.names import list_user_files
from etloom.core.trace import Trace
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays, Mask
from etloom.graphs.gpu_activities import GpuActivities
from etloom.graphs.graph import EdgeKind, Int32Array, Int64Array, PointRole
from etloom.graphs.host_threads import HostThreads

MAX_TAIL_NS, MAX_TAIL_SHARE = 1_000_000, 0.05
"""A thread that waits for a range usually goes on within this time, or this share of its rest, after the range ends."""


@dataclass(eq=False)
class AsyncRanges:
    """Host ranges that begin on one thread and end on another, such as asynchronous collectives of gloo.

    ``row`` and ``ids`` of the events; ``start`` (of the operator that issued it) and ``end``; ``begin`` and ``finish``:
    the points at these times; ``min_latency`` between them.
    """

    row: Int64Array
    ids: Int32Array
    start: Int64Array
    end: Int64Array
    begin: Int32Array
    finish: Int32Array
    min_latency: Int64Array

    def add_edges(self, draft: GraphDraft) -> None:
        """Add an edge from the start to the end of each asynchronous range to the draft of the graph."""
        draft.add_edges(EdgeKind.COMPLETE, self.begin, self.finish, self.min_latency, self.ids)


def find_participations(trace: Trace, events: EventArrays, rank: int, has_peers: bool) -> pl.DataFrame | None:
    """Return a table of the communications in which a rank takes part; None if the graph does not need them.

    The graph needs them if the job has several ranks, or the rank has asynchronous ranges.
    """
    is_needed = has_peers or _is_async(events).any()
    return trace.compute_once(collectives.list_participations, rank) if is_needed else None


def count_gpu_communications(events: EventArrays, activities: GpuActivities) -> int:
    """Return the number of communication kernels of a rank."""
    kinds = events.names.compute_numbers(
        activities.row, categories.number_kernel_type, "kernel", list_user_files()
    )
    copies = events.cats.is_in(categories.MEMCPY_CATEGORIES | categories.MEMSET_CATEGORIES)[activities.row]
    return int(((kinds == KERNEL_TYPES.index("communication")) & ~copies).sum())


def add_async_ranges(
    draft: GraphDraft,
    events: EventArrays,
    threads: HostThreads,
    participations: pl.DataFrame | None,
    rank: int,
) -> AsyncRanges:
    """Add a rank's asynchronous ranges (they begin on one thread and end on another) to the draft of the graph.

    Each begins with the operator that issued it or, if that is unknown, with the event that was open on its thread.
    """
    row = np.flatnonzero(_is_async(events))
    issuer = _find_enclosing_rows(events, threads, row)
    if participations is not None:
        called = participations.filter(pl.col("issuer").is_not_null() & (pl.col("where") == "host"))
        issuers = np.full(len(events), -1, np.int64)
        issuers[events.rows(called["event"])] = events.rows(called["issuer"])
        issuer = np.where(issuers[row] >= 0, issuers[row], issuer)
    place = select_values(threads.start, issuer)
    issued = place >= 0
    ids, range_start, end = events.id[row], events.start[row], events.end[row]
    opens = draft.add_points(range_start, ids, PointRole.START, rank)
    begin, start = opens.copy(), range_start.copy()
    begin[issued], start[issued] = threads.base + place[issued], threads.time[place[issued]]
    draft.add_edges(
        EdgeKind.COMPLETE, begin[issued], opens[issued], (range_start - start)[issued], ids[issued]
    )
    finish = draft.add_points(end, ids, PointRole.END, rank)
    return AsyncRanges(row, ids, start, end, begin, finish, end - start)


def add_range_waits(
    draft: GraphDraft, events: EventArrays, threads: HostThreads, rests: Int64Array, ranges: AsyncRanges
) -> pl.DataFrame:
    """Add an edge from the last asynchronous range that ends during a host thread's pause to the end of that pause.

    Returns:
        point: of the thread, at which the rest ends; before, range, after: the names of the events around the rest and
        of the range; is_wait: whether the thread goes on soon after the range ends.
    """
    order = np.argsort(ranges.end, kind="stable")
    last = np.searchsorted(ranges.end[order], threads.time[rests], side="right") - 1
    ok = last >= 0
    ok[ok] = ranges.end[order][last[ok]] >= threads.time[rests[ok] - 1]
    rests, ended = rests[ok], order[last[ok]]
    draft.add_edges(EdgeKind.RETURN, ranges.finish[ended], threads.base + rests, 0, ranges.ids[ended])
    rest_ns = threads.time[rests] - threads.time[rests - 1]
    tail_ns = threads.time[rests] - ranges.end[ended]
    return pl.DataFrame(
        {
            "point": rests,
            "before": events.names.take(threads.row[rests - 1]),
            "range": events.names.take(ranges.row[ended]),
            "after": events.names.take(threads.row[rests]),
            "is_wait": tail_ns <= np.maximum(MAX_TAIL_NS, MAX_TAIL_SHARE * rest_ns),
        }
    )


def mark_range_waits(rests: Sequence[tuple[HostThreads, pl.DataFrame]]) -> None:
    """Mark the thread pauses on all ranks that lasted until an asynchronous range ended as waits for that range.

    A rest that lasts much longer than the range did not wait for it (a Python sleep, a loop without operators): it
    keeps its time, and must only not end before the range does. Single rests may mislead, since a thread may continue
    late, and a sleep may end together with a range by chance. So the rests at one place of the program (between events
    of the same names), on all ranks, are treated as most of them are; if exactly half of them are waits, each is
    treated by itself.
    """
    frames = [frame.with_columns(thread=pl.lit(i)) for i, (_, frame) in enumerate(rests) if frame.height]
    if not frames:
        return
    share = pl.col("is_wait").mean().over("before", "range", "after")
    table = pl.concat(frames)
    waits = table.filter(pl.when(share == 0.5).then("is_wait").otherwise(share > 0.5))
    for (i,), frame in waits.partition_by("thread", as_dict=True).items():
        rests[i][0].mark_waits(frame["point"].to_numpy(), 0)


def locate_participations(
    participations: pl.DataFrame, events: EventArrays, activities: GpuActivities, ranges: AsyncRanges
) -> pl.DataFrame:
    """Return the communications of a rank that have points in the graph, with these points and their times.

    Adds the points ``begin`` and ``finish``, their times ``start`` and ``end``, and ``place``: the index in the
    ``min_latency`` of the activities or the ranges.
    """
    row = events.rows(participations["event"])
    ranged = np.full(len(events), -1, np.int64)
    ranged[ranges.row] = np.arange(len(ranges.row))
    frames = []
    for side, source, place in (("device", activities, activities.place[row]), ("host", ranges, ranged[row])):
        has = place >= 0
        place = place[has].astype(np.int64)
        frames.append(
            participations.filter(has).with_columns(
                where=pl.lit(side),
                place=place,
                start=source.start[place],
                end=source.end[place],
                begin=source.begin[place],
                finish=source.finish[place],
            )
        )
    return pl.concat(frames)


def add_collective_edges(
    draft: GraphDraft, participations: pl.DataFrame, min_latencies: Mapping[tuple[int, str], Int64Array]
) -> pl.DataFrame:
    """Add arrival and transfer edges between ranks for communications that match across ranks.

    Args:
        min_latencies: by rank and where ("host", "device"), the minimum latencies from start to end; lowered in place.

    Returns:
        rank, matched, local: number of participations that were matched, and that stay local.
    """
    issuers = collectives.match_participations(participations).select("rank", "event", "instance")
    table = _check_instances(participations.join(issuers, on=("rank", "event"), maintain_order="left"))
    matched = table.filter("accepted").sort("instance", "rank", "start", maintain_order=True)
    instances = matched.group_by("instance", maintain_order=True).agg(
        pl.col("arrival").first(),
        least=pl.when(pl.all_horizontal(pl.col("sends", "receives").all()))
        .then((pl.col("end") - pl.col("start")).min())
        .otherwise(0),
    )
    points = draft.add_points(instances["arrival"], -1, PointRole.ARRIVE, -1)
    matched = matched.join(
        instances.select("instance", "least", point=points), on="instance", maintain_order="left"
    )
    senders, receivers = matched.filter("sends"), matched.filter("receives")
    draft.add_edges(EdgeKind.ARRIVAL, senders["begin"], senders["point"], 0, senders["event"])
    kind = np.where(
        (receivers["collective"] == "message").fill_null(False), EdgeKind.MESSAGE, EdgeKind.TRANSFER
    )
    draft.add_edges(
        kind,
        receivers["point"],
        receivers["finish"],
        (receivers["end"] - receivers["arrival"]).clip(0),
        receivers["event"],
    )
    for (rank, side), rows in receivers.partition_by("rank", "where", as_dict=True).items():
        min_latencies[rank, side][rows["place"].to_numpy()] = rows["least"].to_numpy()
    return table.group_by("rank").agg(matched=pl.col("accepted").sum(), local=(~pl.col("accepted")).sum())


def _check_instances(participations: pl.DataFrame) -> pl.DataFrame:
    """Add ``sends``, ``receives``, ``arrival`` (of the last rank, ns) and ``accepted`` to a table of communications.

    ``accepted``: the communication is matched and the times of all participants are consistent.

    ``sends``: others cannot end before it starts. ``receives``: it cannot end before those start.
    """
    role_pairs = [
        get_roles(*row) for row in participations.select("rank", "source", "root", "collective").iter_rows()
    ]
    sends, receives = (pl.Series([pair[i] for pair in role_pairs], dtype=pl.Boolean) for i in (0, 1))
    # gloo and NCCL do not move a message before its receive buffer exists.
    message = (participations["collective"] == "message").fill_null(False)
    arrival = pl.col("start").filter(pl.col("sends")).max().over("instance")
    participations = participations.with_columns(
        sends=sends | message, receives=receives | message
    ).with_columns(arrival=pl.coalesce(arrival, pl.col("start").max().over("instance")))
    leaves = pl.col("end").filter(pl.col("receives")).min().over("instance")
    is_consistent = (leaves >= pl.col("arrival")).fill_null(True)
    return participations.with_columns(accepted=pl.col("instance").is_not_null() & is_consistent)


def _is_async(events: EventArrays) -> Mask:
    """Return a mask of the host events that are not on a thread's call stack (asynchronous ranges)."""
    return events.host & (events.depth < 0)


def _find_enclosing_rows(events: EventArrays, threads: HostThreads, row: Int64Array) -> Int64Array:
    """Return for each event ``row`` the row of the innermost event open on its thread at its start; negative: none."""
    enclosing = np.full(len(row), -1, np.int64)
    if not len(row):
        return enclosing
    thread = events.threads[row]
    bounds = np.append(np.flatnonzero(threads.owner == -2), len(threads.owner))
    for low, high in itertools.pairwise(bounds):
        on_thread = np.flatnonzero(thread == events.threads[threads.row[low]])
        after = low + np.searchsorted(threads.time[low:high], events.start[row[on_thread]], side="right")
        inside = (after > low) & (after < high)
        enclosing[on_thread[inside]] = threads.owner[after[inside]]
    return enclosing
