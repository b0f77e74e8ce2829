"""The graph of points and lags of one rank as activities: pieces of work, each after the end of others.

What simulators of Chakra take: a node begins when all that it depends on have ended, and lasts. So a thread is cut
where anything leaves it or enters it (a launch, a wait, work of another thread) and where another operator goes on;
in between, the time of an operator and of the runtime calls in it is one activity. An operator of which others take
up the middle comes in parts.

Times are cut to whole microseconds before durations are taken, never durations themselves: along every chain of
activities they sum to the time between its ends, within one microsecond. What takes no time on that scale is left
out, and what waited for it waits for what it waited for, save the first part of an operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from etloom.graphs.algorithms import EdgeKind, Graph, Int32Array, Int64Array, PointRole, UInt8Array

NO_OWNER = -1
"""In place of an owner: a thread runs nothing that was recorded."""

_CHAIN_EDGES = (EdgeKind.SEGMENT, EdgeKind.IDLE, EdgeKind.WAIT)
_CROSS_RANK_EDGES = (EdgeKind.ARRIVAL, EdgeKind.TRANSFER, EdgeKind.MESSAGE)


class ActivityKind(IntEnum):
    """What an activity is."""

    HOST = 0  # a part of an operator, or idle time
    WAIT = 1  # what a thread still takes once all that it waited for has ended
    DELAY = 2  # until device work or a range starts, once it was issued and all that it waited for has ended
    DEVICE = 3  # device work
    RANGE = 4  # a range that ends on another thread


@dataclass(frozen=True, eq=False)
class Activities:
    """In the order of their starts, or what waits of its end, so that each comes after all that it depends on.

    ``sort``; ``owner``: row of the event, IDLE for none; ``part`` of its owner, from 0; ``start`` and ``duration``
    in whole us; ``begun``, ``ended``: the same bounds in ns; ``thread``: of host activities the row of an event of
    their thread, else -1. ``cause``: the activity after which it was launched or issued, -1 for none, and
    ``issuer``: the row of the launch call or operator that did so.
    ``first`` (one more than there are) and ``on``: those on which i depends are on[first[i]:first[i + 1]].
    """

    sort: UInt8Array
    owner: Int64Array
    part: Int64Array
    start: Int64Array
    duration: Int64Array
    begun: Int64Array
    ended: Int64Array
    thread: Int64Array
    cause: Int64Array
    issuer: Int64Array
    first: Int64Array
    on: Int64Array

    def __len__(self) -> int:
        return len(self.sort)


def build_activities(graph: Graph, row: Int64Array, owner_of: Int64Array, *, delays: bool) -> Activities:
    """The activities of a graph of one rank.

    row: of each point the row of its event. owner_of: of each edge the row of the event that an activity of it
    belongs to, IDLE for none. delays: whether the time from a launch, or from what a stream did before, to the
    start of device work, or from the start of an operator to that of the range it issues, is an activity of its own;
    else the work starts at once.
    """
    n, target = len(graph), graph.target
    us = np.floor_divide(graph.time, 1000)
    chain = np.isin(graph.kind, _CHAIN_EDGES)
    work = (graph.kind == EdgeKind.KERNEL) | (
        (graph.kind == EdgeKind.COMPLETE) & (graph.role[target] == PointRole.END)
    )
    cross = np.flatnonzero(
        ~chain & ~work & (graph.kind != EdgeKind.COMPLETE) & ~np.isin(graph.kind, _CROSS_RANK_EDGES)
    )
    into, out_of = target[cross], graph.source[cross].copy()
    ends_of = np.full(n, -1, np.int64)  # of a start of device work, its end
    device = graph.kind == EdgeKind.KERNEL
    ends_of[graph.source[device]] = target[device]
    # Work that seems to end after the return of the call that waited for it: two clocks.
    skewed = (graph.kind[cross] == EdgeKind.SYNC) & (ends_of[out_of] >= 0)
    out_of[skewed] = ends_of[out_of[skewed]]

    latest = np.full(n, np.iinfo(np.int64).min)
    np.maximum.at(latest, into, us[out_of])
    joins = np.zeros(n, bool)
    joins[into] = True

    # Threads: runs of pieces without a cut.
    leaves = np.zeros(n, bool)
    leaves[graph.source[~chain]] = True
    pieces = np.flatnonzero(chain)
    piece_into = np.full(n, -1, np.int64)
    piece_into[target[pieces]] = pieces
    before = piece_into[graph.source[pieces]]
    waits = graph.kind == EdgeKind.WAIT
    cut = (before < 0) | (owner_of[pieces] != owner_of[before]) | waits[pieces] | waits[before]
    cut |= (leaves | joins)[graph.source[pieces]] | joins[target[pieces]]
    root = np.arange(len(graph.source))
    root[pieces[~cut]] = before[~cut]
    root = _resolve_pointers(root)
    last = np.full(len(graph.source), -1, np.int64)
    np.maximum.at(last, root[pieces], target[pieces])
    runs = pieces[cut]

    host_end = last[runs]
    host_from = graph.source[runs].astype(np.int64)
    alone = np.flatnonzero(joins & (piece_into < 0) & (ends_of < 0))  # a thread that others set off
    host_end = np.append(host_end, alone)
    host_from = np.append(host_from, np.full(len(alone), -1))
    host_owner = np.append(owner_of[runs], np.full(len(alone), NO_OWNER))
    joined = joins[host_end]
    begin = np.maximum(np.where(host_from >= 0, us[host_from], latest[host_end]), latest[host_end])
    begin = np.minimum(np.where(joined, begin, us[host_from]), us[host_end])
    part = _rank_within_owner(host_owner, host_end)
    keep = (us[host_end] > begin) | joined | ((host_owner != NO_OWNER) & (part == 0))

    # Device work and ranges, and the delays before them.
    lasting = np.flatnonzero(work)
    ends = target[lasting].astype(np.int64)
    begins = graph.source[lasting].astype(np.int64)  # of a range, the start of the operator that issued it
    own_start = np.full(int(row.max(initial=-1)) + 1, -1, np.int64)
    starts = np.flatnonzero(graph.role == PointRole.START)
    own_start[row[starts]] = starts
    is_range = ~device[lasting]
    begins = np.where(is_range, own_start[row[ends]], begins)
    latest[begins[is_range]] = us[graph.source[lasting[is_range]]]
    joins[begins] |= is_range
    ends_of[begins] = ends
    delay = np.where(joins[begins], us[begins] - latest[begins], 0)
    shared = np.zeros(n, bool)  # a start that others start after
    shared[out_of[graph.kind[cross] == EdgeKind.OVERLAP]] = True
    delayed = (delays & (delay > 0)) | shared[begins]
    late = begins[delayed]
    held = np.where(delays, delay[delayed], 0)

    counts = (int(keep.sum()), len(late), len(ends))
    point = np.concatenate([host_end[keep], late, ends])
    begin_us = np.concatenate([begin[keep], us[late] - held, us[begins]])
    begin_point = np.concatenate([np.where(host_from >= 0, host_from, host_end)[keep], late, begins])
    sort = np.concatenate(
        [
            np.where(joined, ActivityKind.WAIT, ActivityKind.HOST)[keep],
            np.full(len(late), ActivityKind.DELAY),
            np.where(is_range, ActivityKind.RANGE, ActivityKind.DEVICE),
        ]
    ).astype(np.uint8)
    owner = np.concatenate([host_owner[keep], row[late], row[ends]])
    parts = np.concatenate([part[keep], np.zeros(sum(counts[1:]), np.int64)])

    # By start, of a range that of the operator that issued it: all that one depends on starts earlier. What waits
    # is put where its wait ends.
    issued = graph.source[lasting[is_range]].astype(np.int64)
    at = np.arange(n)
    at[begins[is_range]] = issued
    waits = np.isin(sort, (ActivityKind.WAIT, ActivityKind.DELAY))
    order = np.argsort(np.where(waits, 2 * at[point], 2 * at[begin_point] + 1), kind="stable")
    place = np.full(n + 1, -1, np.int64)  # so that place[-1] is -1
    place[point[order]] = np.arange(len(order))

    # What ends at a point: its own activity, or what the left-out one that ends there came after.
    stands = np.full(n + 1, -1, np.int64)
    stands[:n][host_end[~keep]] = host_from[~keep]
    stands[point] = point
    stands = _resolve_pointers(stands)
    ending = place[stands]

    of_start = np.full(n, -1, np.int64)
    of_start[begins] = np.where(delayed, place[begins], place[ends])
    waiter = np.where(ends_of[into] >= 0, of_start[into], place[into])
    after = np.concatenate([place[host_end[keep]], waiter, place[ends[delayed]], of_start[begins[is_range]]])
    on = np.concatenate([ending[host_from[keep]], ending[out_of], place[late], ending[issued]])
    some = (on >= 0) & (after >= 0)
    pairs = np.unique(after[some] * (len(order) + 1) + on[some])
    after, on = np.divmod(pairs, len(order) + 1)

    cause, issuer = np.full((2, len(order)), -1, np.int64)
    launches = cross[graph.kind[cross] == EdgeKind.LAUNCH]
    started = np.append(target[launches], begins[is_range])
    left = np.append(graph.source[launches], issued)
    for caused in (of_start[started], place[ends_of[started]]):
        cause[caused], issuer[caused] = ending[left], row[left]
    begun, ended = graph.time[begin_point[order]], graph.time[point[order]]
    joined_order = sort[order] == ActivityKind.WAIT
    begun[joined_order] = np.maximum(begun[joined_order], 1000 * begin_us[order][joined_order])
    is_delay = sort[order] == ActivityKind.DELAY
    begun[is_delay] = 1000 * begin_us[order][is_delay]
    return Activities(
        sort=sort[order],
        owner=owner[order],
        part=parts[order],
        start=begin_us[order],
        duration=us[point[order]] - begin_us[order],
        begun=np.minimum(begun, ended),
        ended=ended,
        thread=np.where(np.isin(sort[order], (ActivityKind.HOST, ActivityKind.WAIT)), row[point[order]], -1),
        cause=cause,
        issuer=issuer,
        first=np.searchsorted(after, np.arange(len(order) + 1)),
        on=on,
    )


def _resolve_pointers(pointer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each ends that goes from a place to the one it points to, as far as that goes."""
    while True:
        further = pointer[pointer]
        if np.array_equal(further, pointer):
            return pointer
        pointer = further


def _rank_within_owner(owner: Int64Array, point: Int32Array | Int64Array) -> Int64Array:
    """How many of the same owner come before each, in the order of their points."""
    order = np.lexsort((point, owner))
    sorted_owner = owner[order]
    fresh = np.append(True, sorted_owner[1:] != sorted_owner[:-1])[: len(order)]
    places = np.arange(len(order))
    count = np.empty(len(order), np.int64)
    count[order] = places - np.maximum.accumulate(np.where(fresh, places, 0)) if len(order) else places
    return count
