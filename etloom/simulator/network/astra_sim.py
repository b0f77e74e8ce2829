"""Computes the time of a single collective, to the nanosecond, as ASTRA-sim's analytical network model does.

A collective is a program of messages for each rank, simulated event by event: a rank sends its next message when it has
processed the part before, which takes the endpoint delay and the reduction of the received data. On several dimensions
it is a sequence of collectives, one for each dimension, which chunks of the data pass one after the other, as in a flow
shop. Without congestion a message takes hops x latency + bytes / bandwidth; with it, a message is stored and forwarded
at each hop, and waits for others on its links. Double binary trees are a formula.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, floor, log2

from etloom.simulator.network.message_exchange import (
    DEFAULT_SETTINGS,
    Dimension,
    Exchange,
    Message,
    Network,
    Program,
    Settings,
)

__all__ = ["Dimension", "Settings", "collective_time", "message_time"]

REDUCING = ("all_reduce", "reduce_scatter")


def collective_time(
    collective: str,
    size: int,
    dimensions: Sequence[Dimension],
    settings: Settings = DEFAULT_SETTINGS,
    members: Sequence[int] | None = None,
    delays: Mapping[int, int] | None = None,
) -> int | None:
    """Return the time of a collective in ns; None for an algorithm that is not modelled.

    Args:
        collective: all_reduce, all_gather, reduce_scatter, all_to_all.
        size: bytes that one rank puts in, as ASTRA-sim's comm_size.
        dimensions: of the topology, innermost first.
        settings: of the simulated system.
        members: positions of the group's ranks on the only dimension; default: all.
        delays: position -> ns after the first ranks at which it begins; on one dimension only.
    """
    chunk = size // settings.splits
    sizes = [chunk] * settings.splits + ([size - chunk * settings.splits] if size % settings.splits else [])
    networks = [Network(dimension, settings, members, delays) for dimension in dimensions]
    if len(networks) == 1:
        programs = [plan(networks[0], collective, part) for part in sizes]
        if all(program is not None for program in programs):
            return Exchange(networks[0], [program for program in programs if program], settings).run()
    chunks = []
    for part in sizes:
        phases = _list_phases(collective, part, dimensions, settings.optimization)
        times = [compute_time(networks[index], name, data) for index, name, data in phases]
        if any(time is None for time in times):
            return None
        chunks.append([(phase[0], time or 0) for phase, time in zip(phases, times, strict=True)])
    return _run_chunks(chunks, len(dimensions), settings)


def message_time(size: int, hops: int, dimension: Dimension, aware: bool) -> int:
    """Return the time (ns) of a message of ``size`` bytes over ``hops`` hops of a network without other messages."""
    return Network(dimension, Settings(aware=aware)).message(size, hops)


def _list_phases(
    collective: str, size: int, dimensions: Sequence[Dimension], optimization: str
) -> list[tuple[int, str, int]]:
    """Split a collective over several network dimensions; return (dimension index, collective, bytes) of each phase."""
    last = len(dimensions) - 1
    if collective == "all_to_all" or (collective == "all_reduce" and optimization == "baseline"):
        return [(index, collective, size) for index in range(last + 1)]
    if collective == "all_gather":
        phases = []
        for index in range(last, -1, -1):
            phases.append((index, collective, size))
            size *= dimensions[index].size
        return phases
    inwards: list[tuple[int, str, int]] = []
    outwards: list[tuple[int, str, int]] = []
    for index, dimension in enumerate(dimensions):
        if index == last:
            inwards.append((index, collective, size))
        else:
            inwards.append((index, "reduce_scatter", size))
            size //= dimension.size
            outwards.append((index, "all_gather", size))
    return inwards + (outwards[::-1] if collective == "all_reduce" else [])


def _run_chunks(chunks: Sequence[Sequence[tuple[int, int]]], dimensions: int, settings: Settings) -> int:
    """Return the time (ns) at which all chunks of the data have completed the phases of a collective.

    A dimension has several queues, which chunks take in turn, and each queue executes its share of ``active_chunks``
    phases at a time. Of the waiting chunks, the last begins first with LIFO, the first with FIFO.
    """
    sign = -1 if settings.policy == "LIFO" else 1
    share = ceil(settings.active_chunks / settings.queues)
    waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}
    free: Counter[tuple[int, int]] = Counter()
    counts = [0] * dimensions
    queue_of: dict[tuple[int, int], tuple[int, int]] = {}
    for chunk, phases in enumerate(chunks):
        for phase, (dimension, _) in enumerate(phases):
            queue = dimension, counts[dimension] % settings.queues
            counts[dimension] += 1
            queue_of[chunk, phase] = queue
            free[queue], waiting[queue] = share, []
    events: list[tuple[int, int, int]] = []  # time, chunk, phase that ends

    def start(queue: tuple[int, int], now: int) -> None:
        if free[queue] and waiting[queue]:
            chunk, phase = heapq.heappop(waiting[queue])
            chunk *= sign
            free[queue] -= 1
            heapq.heappush(events, (now + chunks[chunk][phase][1], chunk, phase))

    def insert(chunk: int, phase: int, now: int) -> None:
        heapq.heappush(waiting[queue_of[chunk, phase]], (sign * chunk, phase))
        start(queue_of[chunk, phase], now)

    for chunk in range(len(chunks)):
        insert(chunk, 0, 0)
    now = 0
    while events:
        now, chunk, phase = heapq.heappop(events)
        free[queue_of[chunk, phase]] += 1
        if phase + 1 < len(chunks[chunk]):
            insert(chunk, phase + 1, now)
        start(queue_of[chunk, phase], now)
    return now


def compute_time(network: Network, name: str, size: int) -> int | None:
    """Return the time (ns) of a collective on a single dimension; None for an algorithm that is not modelled."""
    program = plan(network, name, size)
    return _time_tree(network, name, size) if program is None else Exchange(network, [program]).run()


def plan(network: Network, name: str, size: int) -> Program | None:
    """Return the messages of a collective on a single dimension; None for trees and unsupported algorithms."""
    programs = {"ring": _plan_ring, "direct": _plan_direct, "halvingDoubling": _plan_halving_doubling}
    size = size if name == "all_gather" else max(size, network.npus)
    return programs[network.algorithm](network, name, size) if network.algorithm in programs else None


def _plan_ring(network: Network, name: str, size: int) -> Program:
    n = network.size
    rounds = {"all_reduce": 2 * (n - 1), "all_to_all": n * (n - 1) // 2}.get(name, n - 1)
    part = size if name == "all_gather" else size // n
    reduction = network.reduction(part) if name in REDUCING else 0

    def messages(rank: int) -> list[Message]:
        return [((rank + 1) % n, (rank - 1) % n, part)] * rounds

    return Program(messages, [reduction] * (n - 1) + [0] * (rounds - n + 1), 1, network.is_symmetric)


def _plan_direct(network: Network, name: str, size: int) -> Program:
    n = network.size
    part = size if name == "all_gather" else size // n
    rounds = 2 if name == "all_reduce" else 1
    reduction = network.reduction(part) if name in REDUCING else 0

    def messages(rank: int) -> list[Message]:
        return [((rank + i) % n, (rank - i) % n, part) for i in range(1, n)] * rounds

    return Program(messages, [reduction] * (n - 1) + [0] * (n - 1), n - 1, network.is_symmetric)


def _plan_halving_doubling(network: Network, name: str, size: int) -> Program | None:
    steps = round(log2(network.size))
    if name == "all_to_all" or 2**steps != network.size:
        return None
    offsets = [1 << step for step in range(steps)]
    sizes = [size >> (step + 1) for step in range(steps)]
    reductions = [network.reduction(half) for half in sizes[1:]]
    if name == "all_gather":
        offsets, sizes, reductions = offsets[::-1], [size << step for step in range(steps)], []
    elif name == "all_reduce":  # back, the sizes double again, without what halving cut off
        last = size >> (steps + 1)
        offsets, sizes = offsets + offsets[::-1], sizes + [last << (step + 1) for step in range(steps)]

    def messages(rank: int) -> list[Message]:
        return [(rank ^ offset, rank ^ offset, part) for offset, part in zip(offsets, sizes, strict=True)]

    return Program(messages, reductions + [0] * (len(sizes) - len(reductions)), 1, False)


def _time_tree(network: Network, name: str, size: int) -> int | None:
    if name != "all_reduce" or network.algorithm != "doubleBinaryTree" or any(network.delays):
        return None
    size = max(size, network.npus)
    depth = ceil(log2(network.size))

    def farthest_hops(distance: int) -> int:
        return max(network.hops(first, (first + distance) % network.size) for first in range(network.size))

    time = sum(2 * network.message(size, farthest_hops(1 << level)) for level in range(depth))
    time += (2 * depth + 1) * network.delay + (2 * depth - 1) * network.reduction(size)
    if network.aware and network.kind == "Switch":  # both children send to their parent at once
        time += 2 * (depth - 1) * floor(size / network.rate)
    return time
