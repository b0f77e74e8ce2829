"""Cut the dependency graph of a rank into activities: pieces of work that start when their dependencies have ended.

Simulators of Chakra traces expect this shape: a node starts when all its dependencies have ended, and then takes its
duration. A thread is therefore cut where a dependency leaves or enters it (a launch, a wait, work of another thread)
and where the innermost operator changes; between two cuts, the time of an operator and of the runtime calls inside it
is one activity. An operator that is interrupted by others becomes several parts.

Times are rounded down to whole microseconds before durations are computed, and durations are never rounded: along
every chain of activities the durations add up to the time between its ends, within one microsecond. Activities that
take no time on that scale are left out, and whatever depended on them depends on their predecessors instead. The
first part of an operator is always kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array, PointRole, UInt8Array

NO_OWNER = -1
"""The owner of activities that stand for time in which no recorded event of the thread runs."""

_CHAIN_EDGES = (EdgeKind.SEGMENT, EdgeKind.IDLE, EdgeKind.WAIT)
_CROSS_RANK_EDGES = (EdgeKind.ARRIVAL, EdgeKind.TRANSFER, EdgeKind.MESSAGE)

Mask = NDArray[np.bool_]


class ActivityKind(IntEnum):
    """Kinds of activities: host work, wait, delay before GPU work, GPU work, and asynchronous range."""

    HOST = 0  # a part of an operator, or idle time
    WAIT = 1  # the rest of a wait on a thread, after everything it waited for has ended
    DELAY = 2  # from the launch (and the end of all dependencies) to the start of GPU work
    DEVICE = 3  # GPU work
    RANGE = 4  # a range that ends on another thread


@dataclass(frozen=True, eq=False)
class Activities:
    """The activities of one rank, with times and dependencies, as arrays with one value per activity.

    They are sorted by start (waits and delays by end), so that each one comes after all its dependencies.

    Attributes:
        kind: `ActivityKind`.
        owner: Row of the event, `NO_OWNER` where there is none.
        part: Index of the activity among those of its owner, from 0.
        start: Start in whole microseconds.
        duration: Duration in whole microseconds.
        start_ns: Start in ns.
        end_ns: End in ns.
        thread: Row of an event of the same thread for host activities, else -1.
        cause: Index of the activity that launched or issued this one, -1 where there is none.
        issuer: Row of the launch call or operator that launched or issued it, -1 where there is none.
        first: Activity i depends on ``dependencies[first[i]:first[i + 1]]``; one value more than there are activities.
        dependencies: Indices of activities.
    """

    kind: UInt8Array
    owner: Int64Array
    part: Int64Array
    start: Int64Array
    duration: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    thread: Int64Array
    cause: Int64Array
    issuer: Int64Array
    first: Int64Array
    dependencies: Int64Array

    def __len__(self) -> int:
        return len(self.kind)


def build_activities(
    graph: Graph, row: Int64Array, edge_owner: Int64Array, is_computation: Mask, *, delays: bool
) -> Activities:
    """Cut the dependency graph of one rank into `Activities`.

    Args:
        graph: Dependency graph of one rank.
        row: Row of the event of each point.
        edge_owner: For each edge, the row of the event that its time belongs to, or `NO_OWNER`.
        is_computation: For each event, whether it is a computation of the device. Simulators run one at a time.
        delays: Whether the time from a launch, or from the preceding work of the stream, to the start of GPU work
            becomes an activity, and a range takes the time from the start of the operator that issued it. Otherwise
            the work starts immediately.
    """
    points = _analyze_points(graph)
    host = _cut_threads(graph, points, edge_owner)
    device = _collect_device_work(graph, points, row, is_computation, delays=delays)
    table = _order_activities(points, row, host, device)
    index = _index_activities(len(graph), host, device, table)
    first, dependencies = _collect_dependencies(points, host, device, index, len(table))
    cause, issuer = _find_causes(graph, points, row, device, index, len(table))
    start_us, end_ns = np.floor_divide(table.start_ns, 1000), graph.time[table.end]
    on_host = np.isin(table.kind, (ActivityKind.HOST, ActivityKind.WAIT))
    return Activities(
        kind=table.kind,
        owner=table.owner,
        part=table.part,
        start=start_us,
        duration=points.us[table.end] - start_us,
        start_ns=table.start_ns,
        end_ns=end_ns,
        thread=np.where(on_host, row[table.end], -1),
        cause=cause,
        issuer=issuer,
        first=first,
        dependencies=dependencies,
    )


@dataclass(frozen=True, eq=False)
class _Points:
    """Arrays about a graph's points (starts and ends of events), and about the edges between threads and streams.

    ns: time. us: time in whole microseconds. linked: whether a link ends at the point. latest_ns: latest start of the
    links that end there. work_end: end point of the GPU work that starts there, else -1. edges, source, target: index,
    start point and end point of each link. chain, work: masks of the edges of threads, and of GPU work and ranges.
    """

    ns: Int64Array
    us: Int64Array
    linked: Mask
    latest_ns: Int64Array
    work_end: Int64Array
    edges: Int64Array
    source: Int32Array
    target: Int32Array
    chain: Mask
    work: Mask


def _analyze_points(graph: Graph) -> _Points:
    """Stage 1: describe the graph's points (starts, ends of events), and find the edges between threads and streams."""
    target, kind = graph.target, graph.kind
    us = np.floor_divide(graph.time, 1000)
    chain = np.isin(kind, _CHAIN_EDGES)
    work = (kind == EdgeKind.KERNEL) | ((kind == EdgeKind.COMPLETE) & (graph.role[target] == PointRole.END))
    edges = np.flatnonzero(~chain & ~work & (kind != EdgeKind.COMPLETE) & ~np.isin(kind, _CROSS_RANK_EDGES))
    source, link_target = graph.source[edges].copy(), target[edges]
    work_end = np.full(len(graph), -1, np.int64)
    gpu = kind == EdgeKind.KERNEL
    work_end[graph.source[gpu]] = target[gpu]
    # GPU work that seems to end after the return of the call that waited for it: host and device clocks differ.
    skewed = (kind[edges] == EdgeKind.SYNC) & (work_end[source] >= 0)
    source[skewed] = work_end[source[skewed]]
    latest_ns = np.full(len(graph), np.iinfo(np.int64).min)
    np.maximum.at(latest_ns, link_target, graph.time[source])
    linked = np.zeros(len(graph), bool)
    linked[link_target] = True
    return _Points(graph.time, us, linked, latest_ns, work_end, edges, source, link_target, chain, work)


@dataclass(frozen=True, eq=False)
class _HostActivities:
    """Candidates for the activities of host threads: start and end points in the graph, and owner event of each.

    start: the start point, or -1 if another thread started this one. start_ns: the start time; for a wait, the end of
    the last activity that it waits for. waited: whether a link ends at the end. keep: whether the activity is written.
    """

    start: Int64Array
    end: Int64Array
    start_ns: Int64Array
    owner: Int64Array
    part: Int64Array
    waited: Mask
    keep: Mask


def _cut_threads(graph: Graph, points: _Points, edge_owner: Int64Array) -> _HostActivities:
    """Stage 2: cut host threads into candidate activities, where the owner event changes or an edge joins or leaves."""
    target, ns, us = graph.target, points.ns, points.us
    departs = np.zeros(len(graph), bool)
    departs[graph.source[~points.chain]] = True
    pieces = np.flatnonzero(points.chain)
    piece_into = np.full(len(graph), -1, np.int64)
    piece_into[target[pieces]] = pieces
    previous = piece_into[graph.source[pieces]]
    waits = graph.kind == EdgeKind.WAIT
    cut = (previous < 0) | (edge_owner[pieces] != edge_owner[previous]) | waits[pieces] | waits[previous]
    cut |= (departs | points.linked)[graph.source[pieces]] | points.linked[target[pieces]]
    root = np.arange(len(graph.source))
    root[pieces[~cut]] = previous[~cut]
    root = _resolve_pointers(root)
    last = np.full(len(graph.source), -1, np.int64)
    np.maximum.at(last, root[pieces], target[pieces])
    runs = pieces[cut]

    # Threads that begin at a link: another thread set them off.
    starts = np.flatnonzero(points.linked & (piece_into < 0) & (points.work_end < 0))
    end = np.append(last[runs], starts)
    start = np.append(graph.source[runs].astype(np.int64), np.full(len(starts), -1))
    owner = np.append(edge_owner[runs], np.full(len(starts), NO_OWNER))
    waited = points.linked[end]
    latest_ns = points.latest_ns[end]
    start_ns = np.maximum(np.where(start >= 0, ns[start], latest_ns), latest_ns)
    start_ns = np.minimum(np.where(waited, start_ns, ns[start]), ns[end])
    part = _number_within_owner(owner, end)
    keep = (us[end] > np.floor_divide(start_ns, 1000)) | waited | ((owner != NO_OWNER) & (part == 0))
    return _HostActivities(start, end, start_ns, owner, part, waited, keep)


@dataclass(frozen=True, eq=False)
class _DeviceWork:
    """The GPU work and the asynchronous ranges of a rank, as arrays: graph points of start and end, times, and delays.

    start_ns: start of the work in ns; a range starts when it was issued, since waiting for its backend is part of the
    communication, as in the graph. is_range: whether it is a range. issued: for each range, the point at which it was
    issued. work_end: as in `_Points`, of ranges too. delayed: whether a delay is written before the work. delay_ns:
    start of each of these delays in ns. follows: end of the computation of another stream that the delay, or the work,
    waits for, else -1.
    """

    start: Int64Array
    start_ns: Int64Array
    end: Int64Array
    is_range: Mask
    issued: Int64Array
    work_end: Int64Array
    delayed: Mask
    delay_ns: Int64Array
    follows: Int64Array


def _collect_device_work(
    graph: Graph, points: _Points, row: Int64Array, is_computation: Mask, *, delays: bool
) -> _DeviceWork:
    """Stage 3: collect GPU work and asynchronous ranges, and the delays between their launch and start."""
    work = np.flatnonzero(points.work)
    end = graph.target[work].astype(np.int64)
    start = graph.source[work].astype(np.int64)
    is_range = graph.kind[work] != EdgeKind.KERNEL
    issued = start[is_range]
    event_start = np.full(int(row.max(initial=-1)) + 1, -1, np.int64)
    event_starts = np.flatnonzero(graph.role == PointRole.START)
    event_start[row[event_starts]] = event_starts
    start = np.where(is_range, event_start[row[end]], start)

    work_end = points.work_end.copy()
    work_end[start] = end
    start_ns = points.ns[start]
    if delays:
        start_ns[is_range] = points.ns[issued]
    is_late = points.linked[start] & ~is_range
    delay_ns = np.where(is_late, np.minimum(points.latest_ns[start], points.ns[start]), points.ns[start])
    follows = np.full(len(work), -1, np.int64)
    if delays:
        exclusive = np.flatnonzero(~is_range & is_computation[row[end]])
        follows[exclusive] = _find_interrupting_work(
            points, start[exclusive], end[exclusive], delay_ns[exclusive]
        )
        delay_ns = np.where(follows >= 0, points.ns[follows], delay_ns)
    delay_us = points.us[start] - np.floor_divide(delay_ns, 1000)
    shared = np.zeros(len(graph), bool)  # starts on which other starts depend
    shared[points.source[graph.kind[points.edges] == EdgeKind.OVERLAP]] = True
    delayed = (delays & (delay_us > 0)) | shared[start]
    delay_ns = (delay_ns if delays else points.ns[start])[delayed]
    return _DeviceWork(start, start_ns, end, is_range, issued, work_end, delayed, delay_ns, follows)


def _find_interrupting_work(
    points: _Points, start: Int64Array, end: Int64Array, delay_ns: Int64Array
) -> Int64Array:
    """Return for each computation the end point of the earlier computation that ran during its launch delay, else -1.

    A simulator runs delays and computations one at a time, so a delay must not hold up the work of other streams.
    """
    ends = np.append(-1, np.sort(end))
    previous = ends[np.searchsorted(ends, start) - 1]
    interrupts = (previous >= 0) & (points.ns[previous] > delay_ns)
    return np.where(interrupts, previous, -1)


@dataclass(frozen=True, eq=False)
class _ActivityTable:
    """The ordered activities of a rank: kind, owner event, part number, start and end point in the graph, start ns."""

    kind: UInt8Array
    owner: Int64Array
    part: Int64Array
    start: Int64Array
    end: Int64Array
    start_ns: Int64Array

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, order: Int64Array) -> _ActivityTable:
        """Return the table with its rows in the order of the indices ``order``."""
        return _ActivityTable(*(column[order] for column in vars(self).values()))


def _order_activities(
    points: _Points, row: Int64Array, host: _HostActivities, device: _DeviceWork
) -> _ActivityTable:
    """Stage 4: combine host and device activities, ordered so that each comes after its dependencies."""
    keep, late = host.keep, device.start[device.delayed]
    kinds = (
        np.where(host.waited, ActivityKind.WAIT, ActivityKind.HOST)[keep],
        np.full(len(late), ActivityKind.DELAY),
        np.where(device.is_range, ActivityKind.RANGE, ActivityKind.DEVICE),
    )
    host_start = np.where(host.start >= 0, host.start, host.end)[keep]
    table = _ActivityTable(
        kind=np.concatenate(kinds).astype(np.uint8),
        owner=np.concatenate([host.owner[keep], row[late], row[device.end]]),
        part=np.concatenate([host.part[keep], np.zeros(len(late) + len(device.end), np.int64)]),
        start=np.concatenate([host_start, late, device.start]),
        end=np.concatenate([host.end[keep], late, device.end]),
        start_ns=np.concatenate([host.start_ns[keep], device.delay_ns, device.start_ns]),
    )
    # Sorted by start, a range by the start of the operator that issued it: whatever an activity depends on starts
    # earlier. Waits and delays are sorted by their end.
    position = np.arange(len(points.us))
    position[device.start[device.is_range]] = device.issued
    by_end = np.isin(table.kind, (ActivityKind.WAIT, ActivityKind.DELAY))
    key = np.where(by_end, 2 * position[table.end], 2 * position[table.start] + 1)
    return table.take(np.argsort(key, kind="stable"))


@dataclass(frozen=True, eq=False)
class _Index:
    """Maps each point of the graph (start or end of an event) to the index of its activity; -1 for none.

    ending: the activity that ends at the point. completed: that activity or, where it is left out, the last one before
    it. starting: the delay or work that starts at the point.
    """

    ending: Int64Array
    completed: Int64Array
    starting: Int64Array


def _index_activities(
    count: int, host: _HostActivities, device: _DeviceWork, table: _ActivityTable
) -> _Index:
    """Build the map from the ``count`` points of the graph to the indices of activities that start or end there."""
    ending = np.full(count + 1, -1, np.int64)  # one more, so that ending[-1] is -1
    ending[table.end] = np.arange(len(table))
    completed = np.full(count + 1, -1, np.int64)
    completed[:count][host.end[~host.keep]] = host.start[~host.keep]
    completed[table.end] = table.end
    starting = np.full(count, -1, np.int64)
    starting[device.start] = np.where(device.delayed, ending[device.start], ending[device.end])
    return _Index(ending, ending[_resolve_pointers(completed)], starting)


def _collect_dependencies(
    points: _Points, host: _HostActivities, device: _DeviceWork, index: _Index, count: int
) -> tuple[Int64Array, Int64Array]:
    """Stage 5: collect the dependencies of all activities, as `Activities.first` and `Activities.dependencies`.

    ``count``: number of activities.
    """
    late = device.start[device.delayed]
    into_work = device.work_end[points.target] >= 0
    after = np.concatenate(
        [
            index.ending[host.end[host.keep]],
            np.where(into_work, index.starting[points.target], index.ending[points.target]),
            index.ending[device.end[device.delayed]],
            index.starting[device.start[device.is_range]],
            index.starting[device.start[device.follows >= 0]],
        ]
    )
    before = np.concatenate(
        [
            index.completed[host.start[host.keep]],
            index.completed[points.source],
            index.ending[late],
            index.completed[device.issued],
            index.ending[device.follows[device.follows >= 0]],
        ]
    )
    exists = (before >= 0) & (after >= 0)
    pairs = np.unique(after[exists] * (count + 1) + before[exists])
    after, before = np.divmod(pairs, count + 1)
    return np.searchsorted(after, np.arange(count + 1)), before


def _find_causes(
    graph: Graph, points: _Points, row: Int64Array, device: _DeviceWork, index: _Index, count: int
) -> tuple[Int64Array, Int64Array]:
    """Return for each of ``count`` activities the activity that launched it (index), and the launching event (row).

    -1 for none. Ranges are issued instead of launched.
    """
    cause, issuer = np.full((2, count), -1, np.int64)
    launches = points.edges[graph.kind[points.edges] == EdgeKind.LAUNCH]
    started = np.append(graph.target[launches], device.start[device.is_range])
    launched_at = np.append(graph.source[launches], device.issued)
    for caused in (index.starting[started], index.ending[device.work_end[started]]):
        cause[caused], issuer[caused] = index.completed[launched_at], row[launched_at]
    return cause, issuer


def _resolve_pointers(pointer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Follow the chain of ``pointer`` from each index to an index that points to itself; return the last indices."""
    while True:
        further = pointer[pointer]
        if np.array_equal(further, pointer):
            return pointer
        pointer = further


def _number_within_owner(owner: Int64Array, point: Int32Array | Int64Array) -> Int64Array:
    """Number the activities of each owner event from 0, in the order of their points in the graph."""
    order = np.lexsort((point, owner))
    sorted_owner = owner[order]
    is_first = np.append(True, sorted_owner[1:] != sorted_owner[:-1])[: len(order)]
    positions = np.arange(len(order))
    number = np.empty(len(order), np.int64)
    if len(order):
        number[order] = positions - np.maximum.accumulate(np.where(is_first, positions, 0))
    return number
