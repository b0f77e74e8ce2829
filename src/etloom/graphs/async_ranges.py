"""Add a rank's asynchronous host ranges to the graph (collectives of gloo, ...), and the points that wait for them.

A recording shows when such a range ends, and rarely which call waited for it. A host thread that pauses until a range
ends waited for it. If a range ends while the host is busy, its wait takes no time and leaves no trace: without an edge,
a slower network would delay nothing. So each range has an edge to the first point that needs its result:

- the end of a pause during which it ended, of the thread that issued it or of a thread that paused for that one,
- else the first, after its end, of: a wait operator, DDP's reducer that copies the result to the gradients, the next
  operator that uses the tensor (if an execution trace states it), the optimizer (after a reduction), and a pause that
  waited for a range that was issued later,
- and in any case the end of the step in which it ended, or of the thread that issued it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core import steps
from etloom.core.arrays import select_values
from etloom.core.trace import Trace
from etloom.graphs.draft import GraphDraft
from etloom.graphs.event_arrays import EventArrays, Mask
from etloom.graphs.graph import EdgeKind, Int32Array, Int64Array, PointRole
from etloom.graphs.host_threads import HostThreads, find_rests

MAX_TAIL_NS, MAX_TAIL_SHARE = 1_000_000, 0.05
"""A thread that waits for a range usually goes on within this time, or this share of its rest, after the range ends."""

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
"""Collectives whose results the optimizer needs."""

OPTIMIZER_PATTERN = r"^Optimizer\.step"
_WAIT_OPERATOR = r"(?i)::_?wait"
_FINALIZATION = r"^torch\.distributed\.ddp\.reducer::"
_ENGINE = r"^autograd::engine::|^torch::autograd::|^DistributedDataParallel|^FSDP::"
"""Events that order work: what they do themselves, between the operators inside them, may be a wait."""
_NEVER = np.iinfo(np.int64).max
_MAX_LATER_PAUSES = 8
"""Number of pauses that are examined for one that waited for a range issued later."""


@dataclass(eq=False)
class AsyncRanges:
    """Host ranges that begin on one thread and end on another, such as asynchronous collectives of gloo.

    ``row`` and ``ids`` of the events; ``issuer``: row of the operator that issued it, negative if unknown; ``start``
    (of the issuer) and ``end``; ``begin`` and ``finish``: the points at these times; ``min_latency`` between them;
    ``collective``: its name, "send" or "recv", or null.
    """

    row: Int64Array
    ids: Int32Array
    issuer: Int64Array
    start: Int64Array
    end: Int64Array
    begin: Int32Array
    finish: Int32Array
    min_latency: Int64Array
    collective: pl.Series

    def add_edges(self, draft: GraphDraft) -> None:
        """Add an edge from the start to the end of each asynchronous range to the draft of the graph."""
        draft.add_edges(EdgeKind.COMPLETE, self.begin, self.finish, self.min_latency, self.ids)

    def add_return_edges(self, draft: GraphDraft, index: Int64Array, points: Int64Array) -> None:
        """Add an edge from the end of each of the ranges ``index`` to a point that waits for it."""
        draft.add_edges(EdgeKind.RETURN, self.finish[index], points, 0, self.ids[index])


def mask_async(events: EventArrays) -> Mask:
    """Return a mask of the host events that are not on a thread's call stack (asynchronous ranges)."""
    return events.host & (events.depth < 0)


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
    row = np.flatnonzero(mask_async(events))
    issuer = _find_enclosing_rows(events, threads, row)
    collective = pl.Series(dtype=pl.String).extend_constant(None, len(row))
    if participations is not None:
        called = participations.filter(pl.col("where") == "host")
        place = np.full(len(events), -1, np.int64)
        place[events.rows(called["event"])] = np.arange(len(called))
        recorded = select_values(events.rows(called["issuer"]), place[row])
        issuer = np.where(recorded >= 0, recorded, issuer)
        is_send = (called["source"] == rank).fill_null(False) & (called["collective"] == "message")
        names = pl.select(
            pl.when(is_send).then(pl.lit("send")).otherwise(called["collective"]).alias("name")
        )["name"]
        collective = names.gather(pl.Series(place[row]).set(pl.Series(place[row] < 0), None))
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
    return AsyncRanges(row, ids, issuer, start, end, begin, finish, end - start, collective)


def add_range_waits(
    draft: GraphDraft,
    trace: Trace,
    events: EventArrays,
    threads: HostThreads,
    idle: Mask,
    ranges: AsyncRanges,
) -> tuple[pl.DataFrame, int]:
    """Add an edge from the end of each asynchronous range to every point that waits for it; see the module.

    Returns:
        A row per pause during which a range ended, and the number of ranges whose consumer is inferred since they ended
        while the host was busy. point: of the thread, at which the pause ends; before, range, after: the names of the
        events around the pause and of the last range; is_wait: whether the thread goes on soon after the range ends.
    """
    pauses, index, consumes = _find_pauses(events, threads, idle, ranges)
    ranges.add_return_edges(draft, index, threads.base + pauses)
    hidden = np.setdiff1d(np.arange(len(ranges.row)), index[consumes])
    points = _find_consumers(trace, events, threads, ranges, hidden, pauses[consumes], index[consumes])
    ranges.add_return_edges(draft, hidden[points >= 0], threads.base + points[points >= 0])
    boundaries = _find_step_boundaries(events, threads, ranges)
    bounded = np.flatnonzero(boundaries >= 0)
    ranges.add_return_edges(draft, bounded, threads.base + boundaries[bounded])
    return _describe_pauses(events, threads, ranges, pauses, index), len(hidden)


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


def _find_pauses(
    events: EventArrays, threads: HostThreads, idle: Mask, ranges: AsyncRanges
) -> tuple[Int64Array, Int64Array, Mask]:
    """Return the pauses of a process's threads during which its ranges ended, as pairs of a point and a range.

    Also returns whether the thread needs the range for certain: it issued it, or paused since before it was issued.
    """
    if not len(ranges.row) or not len(threads.owner):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool)
    is_engine = np.append(events.names.match_pattern(_ENGINE), [False, False])[threads.owner]
    rests = find_rests(threads, idle | is_engine)
    caller = np.where(ranges.issuer >= 0, events.threads[ranges.issuer], events.threads[ranges.row])
    pid = events.pid[ranges.row]
    parts = []
    for low, high in _list_threads(threads):
        thread_rests = rests[(rests >= low) & (rests < high)]
        thread_row = threads.row[low]
        selected = np.flatnonzero(pid == events.pid[thread_row])
        at = np.searchsorted(threads.time[thread_rests], ranges.end[selected], side="left")
        inside = at < len(thread_rests)
        selected, point = selected[inside], thread_rests[at[inside]]
        inside = threads.time[point - 1] <= ranges.end[selected]
        # What an event of the engine does itself concerns the thread that issued the range.
        is_caller = caller[selected] == events.threads[thread_row]
        inside &= idle[point] | is_caller
        is_certain = is_caller | (threads.time[point - 1] <= ranges.start[selected])
        parts.append((point[inside], selected[inside], is_certain[inside]))
    points, index, certain = (np.concatenate(part) for part in zip(*parts, strict=True))
    return points, index, certain


def _find_consumers(
    trace: Trace,
    events: EventArrays,
    threads: HostThreads,
    ranges: AsyncRanges,
    hidden: Int64Array,
    pauses: Int64Array,
    index: Int64Array,
) -> Int64Array:
    """Return for each of the ``hidden`` ranges the first point that needs its result, -1 for none but the step.

    ``pauses`` and ``index``: pairs of a pause and the range that it waited for.
    """
    consumers = np.full(len(hidden), -1, np.int64)
    if not len(hidden):
        return consumers
    collective = ranges.collective.gather(hidden)
    is_send = (collective == "send").fill_null(False).to_numpy()
    is_message = is_send | (collective == "message").fill_null(False).to_numpy()
    is_reduction = collective.is_in(REDUCTIONS).fill_null(False).to_numpy()
    on_stack = events.host & (events.depth >= 0)

    def add(points: Int64Array, selected: Mask) -> None:
        """Note points (-1 for none) that come before the consumers found so far, for the ``selected`` ranges."""
        time = np.append(threads.time, _NEVER)
        earlier = selected & (time[points] < time[consumers])
        consumers[earlier] = points[earlier]

    uses = _find_tensor_uses(trace, events, threads, ranges, hidden)
    add(uses, ~is_send)
    for pattern, places, selected in (
        (_WAIT_OPERATOR, threads.end, ~is_message & (uses < 0)),
        (_FINALIZATION, threads.start, is_reduction),
        (OPTIMIZER_PATTERN, threads.start, is_reduction),
    ):
        points = places[on_stack & events.names.match_pattern(pattern)]
        add(_find_first_points(events, threads, ranges, hidden, points[points >= 0]), selected)
    add(_find_later_pauses(threads, ranges, hidden, pauses, index), ~is_message)
    return consumers


def _find_first_points(
    events: EventArrays, threads: HostThreads, ranges: AsyncRanges, index: Int64Array, points: Int32Array
) -> Int64Array:
    """Return for each of the ranges ``index`` the first of ``points`` of its process after its end; -1 for none."""
    first = np.full(len(index), -1, np.int64)
    pids = events.pid[threads.row[points]]
    for pid in np.unique(pids):
        candidates = points[pids == pid]
        candidates = candidates[np.argsort(threads.time[candidates], kind="stable")]
        selected = np.flatnonzero(events.pid[ranges.row[index]] == pid)
        at = np.searchsorted(threads.time[candidates], ranges.end[index[selected]], side="left")
        first[selected[at < len(candidates)]] = candidates[at[at < len(candidates)]]
    return first


def _find_tensor_uses(
    trace: Trace, events: EventArrays, threads: HostThreads, ranges: AsyncRanges, index: Int64Array
) -> Int64Array:
    """Return for each of the ranges ``index`` the start of the first operator after it that uses one of its tensors.

    -1 for none. The execution trace states the storages of tensors; their numbers are used again with the memory, but
    not before the range has ended.
    """
    first = np.full(len(index), -1, np.int64)
    issued = index[ranges.issuer[index] >= 0]
    if not len(issued) or not trace.rows("tensors") or not trace.rows("links"):
        return first
    tensors = trace.tensors.select("node", "storage_id").filter(pl.col("storage_id") > 0)
    links = trace.links.select("node", "event").unique("event", keep="first")
    calls = pl.DataFrame(
        {"range": issued, "event": events.id[ranges.issuer[issued]], "end": ranges.end[issued]}
    )
    storages = calls.join(links.cast({"event": pl.Int32}), on="event").join(tensors, on="node")
    storages = storages.select("range", "storage_id", "end").unique()
    uses = tensors.filter(pl.col("storage_id").is_in(storages["storage_id"].unique().implode()))
    uses = uses.join(links, on="node")
    place = select_values(threads.start, events.rows(uses["event"]))
    uses = uses.select("storage_id", point=pl.Series(place)).filter(pl.col("point") >= 0)
    uses = uses.with_columns(time=pl.Series(threads.time[uses["point"].to_numpy()])).sort("time")
    matches = storages.sort("end").join_asof(
        uses, left_on="end", right_on="time", by="storage_id", strategy="forward", check_sortedness=False
    )
    matches = matches.drop_nulls("point").sort("time").unique("range", keep="first", maintain_order=True)
    first[np.searchsorted(index, matches["range"].to_numpy())] = matches["point"].to_numpy()
    return first


def _find_later_pauses(
    threads: HostThreads, ranges: AsyncRanges, hidden: Int64Array, pauses: Int64Array, index: Int64Array
) -> Int64Array:
    """Return for each hidden range the next pause that waited for a collective issued later; -1 for none.

    Programs wait for collectives in the order in which they issued them.
    """
    first = np.full(len(hidden), -1, np.int64)
    is_message = ranges.collective.gather(index).is_in(("send", "message")).fill_null(False).to_numpy()
    pauses, issued = pauses[~is_message], ranges.start[index[~is_message]]
    order = np.argsort(threads.time[pauses], kind="stable")
    pauses, issued = pauses[order], issued[order]
    at = np.searchsorted(threads.time[pauses], ranges.end[hidden], side="left")
    for _ in range(_MAX_LATER_PAUSES):
        open_rows = np.flatnonzero((first < 0) & (at < len(pauses)))
        is_later = issued[at[open_rows]] > ranges.start[hidden[open_rows]]
        first[open_rows[is_later]] = pauses[at[open_rows[is_later]]]
        at += 1
    return first


def _find_step_boundaries(events: EventArrays, threads: HostThreads, ranges: AsyncRanges) -> Int64Array:
    """Return for each range the end of the step in which it ended, the start of the next step, or the last point of the
    thread that issued it; -1 if all of them come before its end."""
    index = np.arange(len(ranges.row))
    if not len(index):
        return index
    annotated = steps.match_steps(events.table["name"], events.host & (events.depth >= 0))
    points = np.concatenate([places[annotated] for places in (threads.start, threads.end)])
    boundaries = _find_first_points(events, threads, ranges, index, points[points >= 0])
    caller = events.threads[np.where(ranges.issuer >= 0, ranges.issuer, ranges.row)]
    for low, high in _list_threads(threads):
        is_last = (boundaries < 0) & (caller == events.threads[threads.row[low]])
        boundaries[is_last & (threads.time[high - 1] >= ranges.end)] = high - 1
    return boundaries


def _describe_pauses(
    events: EventArrays, threads: HostThreads, ranges: AsyncRanges, pauses: Int64Array, index: Int64Array
) -> pl.DataFrame:
    """Return a row for each pause with the last of its ranges; see `add_range_waits`."""
    order = np.lexsort((ranges.end[index], pauses))
    pauses, index = pauses[order], index[order]
    last = np.flatnonzero(np.append(np.diff(pauses) != 0, True)[: len(pauses)])
    pauses, index = pauses[last], index[last]
    rest_ns = threads.time[pauses] - threads.time[pauses - 1]
    tail_ns = threads.time[pauses] - ranges.end[index]
    return pl.DataFrame(
        {
            "point": pauses,
            "before": events.names.take(threads.row[pauses - 1]),
            "range": events.names.take(ranges.row[index]),
            "after": events.names.take(threads.row[pauses]),
            "is_wait": tail_ns <= np.maximum(MAX_TAIL_NS, MAX_TAIL_SHARE * rest_ns),
        }
    )


def _list_threads(threads: HostThreads) -> list[tuple[int, int]]:
    """Return the first point of each thread, and the one after its last."""
    first = np.flatnonzero(threads.owner == -2).tolist()
    return list(itertools.pairwise([*first, len(threads.owner)]))


def _find_enclosing_rows(events: EventArrays, threads: HostThreads, row: Int64Array) -> Int64Array:
    """Return for each event ``row`` the row of the innermost event open on its thread at its start; negative: none."""
    enclosing = np.full(len(row), -1, np.int64)
    if not len(row):
        return enclosing
    thread = events.threads[row]
    for low, high in _list_threads(threads):
        on_thread = np.flatnonzero(thread == events.threads[threads.row[low]])
        after = low + np.searchsorted(threads.time[low:high], events.start[row[on_thread]], side="right")
        inside = (after > low) & (after < high)
        enclosing[on_thread[inside]] = threads.owner[after[inside]]
    return enclosing
