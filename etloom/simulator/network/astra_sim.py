"""Times of single collectives as ASTRA-sim's analytical network gives them, most of them to the nanosecond.

A collective is a sequence of rounds, each the slowest message of the round plus the endpoint delay and the reduction
of the received data. On several dimensions it is a sequence of collectives, one for each dimension, which chunks of
the data pass one after the other, as in a flow shop. Without congestion a message takes hops x latency + bytes /
bandwidth; with it, a message is stored and forwarded at each hop, and waits for others on its links.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log2

REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Dimension:
    """A dimension: kind Ring, Switch or FullyConnected, its size, bandwidth (2**30 B/s), latency and algorithm."""

    kind: str
    size: int
    bandwidth: float
    latency_ns: float
    algorithm: str = "ring"


@dataclass(frozen=True)
class Settings:
    """The settings of the simulated system, named as ASTRA-sim names them; times in ns, memory in GB/s."""

    aware: bool = False
    endpoint_delay: int = 10
    local_mem_bw: float = 1600
    optimization: str = "localBWAware"
    splits: int = 1
    policy: str = "LIFO"
    active_chunks: int = 1


DEFAULT_SETTINGS = Settings()
GROUP_DELAY = 10
"""The endpoint delay, ns, in a group smaller than all ranks, whatever is configured."""


def collective_time(
    collective: str,
    size: int,
    dimensions: Sequence[Dimension],
    settings: Settings = DEFAULT_SETTINGS,
    members: Sequence[int] | None = None,
) -> int | None:
    """Return the time of a collective in ns; None for an algorithm that is not modelled.

    Args:
        collective: all_reduce, all_gather, reduce_scatter, all_to_all.
        size: bytes that one rank puts in, as ASTRA-sim's comm_size.
        dimensions: of the topology, innermost first.
        settings: of the simulated system.
        members: positions of the group's ranks on the only dimension; default: all.
    """
    chunk = size // settings.splits
    sizes = [chunk] * settings.splits + ([size - chunk * settings.splits] if size % settings.splits else [])
    chunks = []
    for part in sizes:
        phases = _list_phases(collective, part, dimensions, settings.optimization)
        times = [
            _Network(dimensions[index], settings, members).collective(name, data)
            for index, name, data in phases
        ]
        if any(time is None for time in times):
            return None
        chunks.append([(phase[0], time or 0) for phase, time in zip(phases, times, strict=True)])
    return _run_chunks(chunks, len(dimensions), settings)


def message_time(size: int, hops: int, dimension: Dimension, aware: bool) -> int:
    """Return the time of one message over a number of hops, ns."""
    return _Network(dimension, Settings(aware=aware)).message(size, hops)


def _list_phases(
    collective: str, size: int, dimensions: Sequence[Dimension], optimization: str
) -> list[tuple[int, str, int]]:
    """Return (dimension, collective, bytes) of each phase of a collective on several dimensions."""
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
    """Return the time at which all chunks have passed; a dimension executes ``active_chunks`` phases at a time."""
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(dimensions)]
    free = [settings.active_chunks] * dimensions
    events: list[tuple[int, int, int]] = []  # time, chunk, phase that ends

    def start(index: int, now: int) -> None:
        if free[index] and waiting[index]:
            chunk, phase = waiting[index].pop(-1 if settings.policy == "LIFO" else 0)
            free[index] -= 1
            heapq.heappush(events, (now + chunks[chunk][phase][1], chunk, phase))

    for chunk, phases in enumerate(chunks):
        waiting[phases[0][0]].append((chunk, 0))
        start(phases[0][0], 0)
    now = 0
    while events:
        now, chunk, phase = heapq.heappop(events)
        free[chunks[chunk][phase][0]] += 1
        if phase + 1 < len(chunks[chunk]):
            waiting[chunks[chunk][phase + 1][0]].append((chunk, phase + 1))
        for index in range(dimensions):
            start(index, now)
    return now


class _Network:
    """One dimension; times in ns."""

    def __init__(
        self, dimension: Dimension, settings: Settings, members: Sequence[int] | None = None
    ) -> None:
        self.kind, self.latency, self.npus = dimension.kind, dimension.latency_ns, dimension.size
        self.members = list(range(dimension.size)) if members is None else list(members)
        self.size = len(self.members)
        self.is_whole = self.size == dimension.size
        self.algorithm = dimension.algorithm
        self.rate = dimension.bandwidth * 2**30 / 1e9
        self.aware, self.delay, self.memory = settings.aware, settings.endpoint_delay, settings.local_mem_bw
        if not self.is_whole:
            self.delay = GROUP_DELAY

    def hops(self, distance: int, first: int = 0) -> int:
        """Return the hops from a member to the member ``distance`` places after it."""
        if self.kind == "Ring":
            gap = self.members[(first + distance) % self.size] - self.members[first]
            return min(gap % self.npus, -gap % self.npus)
        return 2 if self.kind == "Switch" else 1

    def farthest_hops(self, distance: int) -> int:
        """Return the largest number of hops from any member to the member ``distance`` places after it."""
        return max(self.hops(distance, first) for first in ([0] if self.is_whole else range(self.size)))

    def message(self, size: int, hops: int) -> int:
        if self.aware:
            return hops * floor(self.latency + size / self.rate)
        return floor(hops * self.latency + size / self.rate)

    def reduction(self, size: int) -> int:
        return 3 * floor(size / self.memory)

    def collective(self, name: str, size: int) -> int | None:
        """Return the time of a collective; None for an algorithm that is not modelled."""
        if name != "all_gather":
            size = max(size, self.npus)
        method = {
            "ring": self._ring,
            "direct": self._direct,
            "halvingDoubling": self._halving_doubling,
            "doubleBinaryTree": self._tree,
        }.get(self.algorithm)
        return None if method is None else method(name, size)

    def _ring(self, name: str, size: int) -> int:
        n = self.size
        rounds = {"all_reduce": 2 * (n - 1), "all_to_all": n * (n - 1) // 2}.get(name, n - 1)
        part = size if name == "all_gather" else size // n
        reductions = (n - 1) * self.reduction(part) if name in REDUCING else 0
        if self.is_whole:
            messages = rounds * self.message(part, self.hops(1))
        else:  # data passes so many members one after the other
            by_member = [self.message(part, self.hops(1, first)) for first in range(self.size)]
            messages = max(
                sum(by_member[(first + place) % self.size] for place in range(rounds))
                for first in range(self.size)
            )
        return messages + (rounds + 1) * self.delay + reductions

    def _direct(self, name: str, size: int) -> int:
        part = size if name == "all_gather" else size // self.size
        farthest = self._exchange(part)
        if name == "all_reduce":
            return 2 * farthest + 3 * self.delay + self.reduction(part)
        return farthest + 2 * self.delay + (self.reduction(part) if name == "reduce_scatter" else 0)

    def _exchange(self, size: int) -> int:
        """Return the time of one message from each rank to every other at once."""
        if self.aware and self.kind == "Switch":
            return (self.size - 2) * floor(size / self.rate) + 2 * floor(self.latency + size / self.rate)
        if self.aware and self.kind == "Ring" and self.is_whole:
            return self._exchange_on_ring(size)
        return max(self.message(size, self.farthest_hops(distance)) for distance in range(1, self.size))

    def _exchange_on_ring(self, size: int) -> int:
        """Return that time on a ring whose links queue messages; all links of a direction behave like one."""
        busy, passage = floor(size / self.rate), floor(self.latency + size / self.rate)
        queue = [(0, order, hops) for order, hops in enumerate(range(1, self.size // 2 + 1))]
        free, count, end = 0, len(queue), 0
        while queue:
            ready, _, hops = heapq.heappop(queue)
            start = max(free, ready)
            free = start + busy
            if hops > 1:
                count += 1
                heapq.heappush(queue, (start + passage, count, hops - 1))
            else:
                end = max(end, start + passage)
        return end

    def _halving_doubling(self, name: str, size: int) -> int | None:
        steps = round(log2(self.size))
        if name == "all_to_all" or 2**steps != self.size:
            return None
        time = self.delay
        if name == "all_gather":
            for step in range(steps):
                time += self.message(size << step, self.farthest_hops(self.size >> (step + 1))) + self.delay
            return time
        for step in range(steps):
            time += self.message(size >> (step + 1), self.farthest_hops(1 << step)) + self.delay
            if step + 1 < steps:
                time += self.reduction(size >> (step + 2))
            if name == "all_reduce":
                time += self.message(size >> (step + 1), self.farthest_hops(1 << step)) + self.delay
        return time

    def _tree(self, name: str, size: int) -> int | None:
        if name != "all_reduce":
            return None
        depth = ceil(log2(self.size))
        time = sum(2 * self.message(size, self.farthest_hops(1 << level)) for level in range(depth))
        time += (2 * depth + 1) * self.delay + (2 * depth - 1) * self.reduction(size)
        if self.aware and self.kind == "Switch":  # both children send to their parent at once
            time += 2 * (depth - 1) * floor(size / self.rate)
        return time
