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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2

# Simulates, event by event, the messages of a collective on a dimension of ASTRA-sim's analytical network.


@dataclass(frozen=True)
class Dimension:
    """A network dimension: kind (Ring, Switch, FullyConnected), size, bandwidth (2**30 B/s), latency and algorithm."""

    kind: str
    size: int
    bandwidth: float
    latency_ns: float
    algorithm: str = "ring"


@dataclass(frozen=True)
class Settings:
    """Settings of the simulated system with ASTRA-sim's names; delays in ns, memory bandwidth in GB/s."""

    aware: bool = False
    endpoint_delay: int = 10
    local_mem_bw: float = 1600
    optimization: str = "localBWAware"
    splits: int = 1
    policy: str = "LIFO"
    active_chunks: int = 1
    queues: int = 1


DEFAULT_SETTINGS = Settings()
GROUP_DELAY = 10
"""The endpoint delay, ns, in a group smaller than all ranks, whatever is configured."""


Message = tuple[int, int, int]
"""Receiver and sender of the part expected in turn, as positions in the group, and bytes."""


class Network:
    """Hops, links and message times (ns) of a group of ranks on a single network dimension."""

    def __init__(
        self,
        dimension: Dimension,
        settings: Settings,
        members: Sequence[int] | None = None,
        delays: Mapping[int, int] | None = None,
    ) -> None:
        self.kind, self.latency, self.npus = dimension.kind, dimension.latency_ns, dimension.size
        self.members = list(range(dimension.size)) if members is None else list(members)
        self.size = len(self.members)
        self.delays = [(delays or {}).get(member, 0) for member in self.members]
        self.algorithm = dimension.algorithm
        self.rate = dimension.bandwidth * 2**30 / 1e9
        self.aware, self.delay, self.memory = settings.aware, settings.endpoint_delay, settings.local_mem_bw
        is_complete = self.size == dimension.size
        if not is_complete:
            self.delay = GROUP_DELAY
        self.is_symmetric = (is_complete or self.kind != "Ring") and not any(self.delays)

    def hops(self, sender: int, receiver: int) -> int:
        """Return the number of hops between two members; ``sender`` and ``receiver`` are positions in the group."""
        if self.kind == "Ring":
            gap = self.members[receiver] - self.members[sender]
            return min(gap % self.npus, -gap % self.npus)
        return 2 if self.kind == "Switch" else 1

    def link(self, sender: int, receiver: int, hop: int, is_alike: bool) -> object:
        """Return an identifier of the link at a hop of a message; with ``is_alike``, equivalent links have the same
        identifier."""
        if self.kind == "Switch":
            return hop if is_alike else (hop, receiver if hop else sender)
        if self.kind != "Ring":
            return (receiver - sender) % self.size if is_alike else (sender, receiver)
        first, last = self.members[sender], self.members[receiver]
        step = 1 if (last - first) % self.npus <= (first - last) % self.npus else -1
        return step if is_alike else ((first + step * hop) % self.npus, step)

    def message(self, size: int, hops: int) -> int:
        """Return the time (ns) of a message of ``size`` bytes over ``hops`` hops when no other message delays it."""
        if self.aware:
            return hops * floor(self.latency + size / self.rate)
        return floor(hops * self.latency + size / self.rate)

    def reduction(self, size: int) -> int:
        """Return the time (ns) to reduce a received part of ``size`` bytes in local memory."""
        return 3 * floor(size / self.memory)


@dataclass(frozen=True)
class Program:
    """Messages that each rank sends in a collective, and the reduction times (ns) of the received parts.

    Attributes:
        messages: returns those of a rank, in the order in which it sends them.
        reductions: the time to add the first, second, ... received part, ns.
        first: the number of messages that are sent at the begin; each further one is sent when another part has been
            processed, and the corresponding number of parts has been received.
        is_alike: whether all ranks do the same at the same times.
    """

    messages: Callable[[int], list[Message]]
    reductions: list[int]
    first: int
    is_alike: bool


class Exchange:
    """Event simulation of the messages of a collective, for all chunks of its data.

    A rank expects a part with each message that it sends. It processes a received part: endpoint delay and reduction.
    With congestion, a message waits at each link for those before it. Where all ranks are alike, one stands for all,
    with one link of each kind. Chunks are programs of their own on the same links, of which each rank executes
    several at a time.
    """

    def __init__(
        self, network: Network, programs: Sequence[Program], settings: Settings = DEFAULT_SETTINGS
    ) -> None:
        self.network = network
        self.is_alike = all(program.is_alike for program in programs)
        ranks = range(1 if self.is_alike else network.size)
        self.chunks = [_Chunk(program, len(ranks)) for program in programs]
        self.share = ceil(settings.active_chunks / settings.queues)
        self.waiting = [[self._order(queue, settings) for queue in range(settings.queues)] for _ in ranks]
        self.free_at: dict[object, int] = {}
        self.events: list[tuple[int, int, int, int, int, int]] = []
        """Time, order, chunk, rank, message (-1: a part is processed), hop."""
        self.order = 0

    def _order(self, queue: int, settings: Settings) -> list[int]:
        """Return the chunks of a queue in execution order: those that begin at once, then the others (LIFO or FIFO)."""
        chunks = list(range(queue, len(self.chunks), settings.queues))
        others = chunks[self.share :]
        return chunks[: self.share] + (others[::-1] if settings.policy == "LIFO" else others)

    def run(self) -> int:
        """Run the simulation, and return the time (ns) at which the last received part is processed."""
        for rank in range(len(self.waiting)):
            for queue in self.waiting[rank]:
                for _ in range(self.share):
                    self._begin(rank, queue, self.network.delays[rank])
        now = 0
        while self.events:
            now, _, chunk, rank, message, hop = heapq.heappop(self.events)
            if message < 0:
                self._proceed(chunk, rank, now)
            else:
                self._hop(chunk, rank, message, hop, now)
        return now

    def _begin(self, rank: int, queue: list[int], now: int) -> None:
        """Begin the next chunk in a queue of a rank at the time ``now``."""
        if queue:
            chunk = queue.pop(0)
            for _ in range(self.chunks[chunk].program.first):
                self._schedule(now + self.network.delay, chunk, rank)

    def _schedule(self, time: int, chunk: int, rank: int, message: int = -1, hop: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, chunk, rank, message, hop))

    def _proceed(self, number: int, rank: int, now: int) -> None:
        """Count a part of a chunk as processed on a rank, and send the messages that waited for it."""
        chunk = self.chunks[number]
        chunk.processed[rank] += 1
        first, sent, total = chunk.program.first, chunk.sent[rank], len(chunk.messages[rank])
        if chunk.processed[rank] == first + total:
            queues = self.waiting[rank]
            self._begin(rank, queues[number % len(queues)], now)
        if sent >= first and chunk.received[rank] < first:
            return
        for message in range(sent, min(chunk.processed[rank], total)):
            receiver, sender, size = chunk.messages[rank][message]
            chunk.sent[rank] += 1
            if self.network.aware:
                self._schedule(now, number, rank, message)
            else:
                hops = self.network.hops(rank, receiver)
                self._schedule(now + self.network.message(size, hops), number, rank, message, hops)
            if chunk.expect(rank, sender):
                self._receive(number, rank, now)

    def _hop(self, number: int, rank: int, message: int, hop: int, now: int) -> None:
        """Move a message over its next link, as soon as the link is free, or deliver it after the last hop."""
        network, chunk = self.network, self.chunks[number]
        receiver, _, size = chunk.messages[rank][message]
        if hop < network.hops(rank, receiver):
            link = network.link(rank, receiver, hop, self.is_alike)
            start = max(now, self.free_at.get(link, 0))
            self.free_at[link] = start + floor(size / network.rate)
            self._schedule(
                start + floor(network.latency + size / network.rate), number, rank, message, hop + 1
            )
            return
        at = receiver % len(chunk.messages)
        if chunk.arrive(at, (at - (receiver - rank)) % network.size):
            self._receive(number, at, now)

    def _receive(self, number: int, rank: int, now: int) -> None:
        chunk = self.chunks[number]
        reduction = chunk.program.reductions[chunk.received[rank]]
        chunk.received[rank] += 1
        self._schedule(now + self.network.delay + reduction, number, rank)


class _Chunk:
    """Progress of a chunk on each rank: messages sent, parts received, and parts processed."""

    def __init__(self, program: Program, ranks: int) -> None:
        self.program = program
        self.messages = [program.messages(rank) for rank in range(ranks)]
        self.sent, self.received, self.processed = ([0] * ranks for _ in range(3))
        self.balance: list[Counter[int]] = [Counter() for _ in range(ranks)]
        """By sender, the parts that arrived, without those that were expected by then."""

    def expect(self, rank: int, sender: int) -> bool:
        """Record that a rank expects a part from a sender; return whether the part has already arrived."""
        self.balance[rank][sender] -= 1
        return self.balance[rank][sender] >= 0

    def arrive(self, rank: int, sender: int) -> bool:
        """Record that a part from a sender has arrived at a rank; return whether the rank already expects it."""
        self.balance[rank][sender] += 1
        return self.balance[rank][sender] <= 0


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
