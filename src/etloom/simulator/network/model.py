"""Network model: effective bandwidth and latency by level, and the transfer times of a scenario's communications."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import polars as pl

from etloom.simulator.network.topology import Topology
from etloom.simulator.scenario import Communications

HOST_WORKERS = 2
"""Communications of a process group that gloo executes at a time (its default number of threads)."""


@dataclass(frozen=True)
class NetworkModel:
    """A network model: topology with effective bandwidths, collective algorithm, and efficiency of shared links.

    Attributes:
        topology: the levels; their bandwidth times their efficiency is what transfers reach.
        algorithm: of collectives on devices.
        sharing_efficiency: share of a link's bandwidth that several transfers on it reach together.
    """

    topology: Topology
    algorithm: str = "ring"
    sharing_efficiency: float = 1.0

    def scale_bandwidth(self, factor: float) -> NetworkModel:
        """Return the network with the bandwidth of every level multiplied by ``factor``."""
        levels = tuple(
            replace(level, bytes_per_second=level.bytes_per_second * factor) for level in self.topology.levels
        )
        return replace(self, topology=replace(self.topology, levels=levels))

    def with_latency(self, latency_ns: float) -> NetworkModel:
        """Return the network with the latency of every level set to ``latency_ns``."""
        levels = tuple(replace(level, latency_ns=latency_ns) for level in self.topology.levels)
        return replace(self, topology=replace(self.topology, levels=levels))

    def split(self, collective: str | None, size: int, ranks: list[int], side: str) -> list[Share] | None:
        """Return the cost of a communication on each network level; None if its algorithm is unknown."""
        dims = find_dims(self.topology, ranks)
        if side == "host":
            return split_gloo(collective, size, dims)
        return split_collective(collective, size, dims, self.algorithm)

    def latency_ns(self, shares: list[Share]) -> float:
        """Return the part of a communication's time (ns) in which it uses no link: message latencies, idle phases."""
        return sum(
            share.rounds * self.topology.levels[share.level].latency_ns
            + self._bytes_ns(share.level, share.idle_bytes)
            for share in shares
        )

    def data_ns(self, share: Share) -> float:
        """Return the time (ns) to transfer the data on a network level when no other transfer uses its links."""
        return self._bytes_ns(share.level, share.bytes)

    def _bytes_ns(self, level: int, size: float) -> float:
        link = self.topology.levels[level]
        return size * 1e9 / (link.bytes_per_second * link.efficiency)


class TransferTimes:
    """Computes when the communications of a scenario complete on a network whose links they share.

    Attributes:
        instances: numbers of the communications whose time the network determines, in the order of the results.
        unknown: communications of unknown size or algorithm, which keep their time.
    """

    def __init__(self, communications: Communications, network: NetworkModel) -> None:
        table, parts = communications.instances, communications.participations
        self._sharing_efficiency = network.sharing_efficiency
        sized = table.filter(pl.col("bytes").is_not_null() & (pl.col("group_size") > 1))
        splits: dict[tuple[object, ...], list[Share] | None] = {}
        self._fixed: list[tuple[float, tuple[tuple[float, int], ...], list[int], str | None]] = []
        placed = []
        for instance, collective, size, members, group, side in sized.select(
            "instance", "collective", "bytes", "ranks", "group", "where"
        ).iter_rows():
            key = (collective, size, tuple(members), side)
            if key not in splits:
                splits[key] = network.split(collective, size, members, side)
            shares = splits[key]
            if shares is None:
                continue
            placed.append(instance)
            data = tuple((network.data_ns(share), share.level) for share in shares)
            self._fixed.append((network.latency_ns(shares), data, members, group if side == "host" else None))
        self.instances = np.array(placed, np.int64)
        self.unknown = table.height - len(placed)
        self._is_host = np.isin(self.instances, table.filter(where="host")["instance"].to_numpy())
        self._find_participations(parts)
        self._number_links()

    def _find_participations(self, parts: pl.DataFrame) -> None:
        """Map each rank's participation in a communication to the index of its instance in ``instances``."""
        place = pl.DataFrame({"instance": self.instances, "place": np.arange(len(self.instances))})
        joined = (
            parts.with_row_index("part")
            .join(place, on="instance", maintain_order="left")
            .sort("place", "part")
        )
        self.parts = joined["part"].to_numpy().astype(np.int64)
        self.place = joined["place"].to_numpy().astype(np.int64)
        self._ranks = joined["rank"].to_list()
        self._bounds = np.searchsorted(self.place, np.arange(len(self.instances) + 1)).tolist()

    def _number_links(self) -> None:
        """Number the links that transfers use; links that carry the same transfers have a common number."""
        groups: dict[tuple[int, tuple[int, ...]], int] = {}
        on_link: dict[tuple[int, int], set[int]] = defaultdict(set)
        for _, data, members, _ in self._fixed:
            for _, level in data:
                key = (level, tuple(members))
                if key not in groups:
                    groups[key] = len(groups)
                    for rank in members:
                        on_link[level, rank].add(groups[key])
        numbers: dict[frozenset[int], int] = {}
        number = {link: numbers.setdefault(frozenset(users), len(numbers)) for link, users in on_link.items()}
        links = {
            (level, members): tuple(sorted({number[level, rank] for rank in members}))
            for level, members in groups
        }
        self._flows = [
            tuple(Flow(solo_ns, links[level, tuple(members)]) for solo_ns, level in data)
            for _, data, members, _ in self._fixed
        ]

    def finish(self, begins: np.ndarray) -> np.ndarray:
        """Return the time (ns) at which each communication completes when transfers share links.

        Args:
            begins: time at which each of ``parts`` begins, ns.
        """
        values = begins.astype(float).tolist()
        transfers = []
        for number, (latency, _, _, group) in enumerate(self._fixed):
            low, high = self._bounds[number : number + 2]
            queues: tuple[object, ...] = (
                tuple((rank, group) for rank in self._ranks[low:high])
                if self._is_host[number]
                else (None,) * (high - low)
            )
            transfers.append(Transfer(tuple(values[low:high]), queues, latency, self._flows[number]))
        return np.array(share_links(transfers, HOST_WORKERS, self._sharing_efficiency))


# Computes the cost of collective algorithms per network level: sequential messages, and bytes on the busiest link.
#
# A collective on n ranks with S bytes (as nccl-tests defines them) takes ``rounds`` messages in sequence and moves
# ``bytes`` over the busiest link in one direction; alone on its links it takes rounds x latency + bytes / bandwidth.
# See Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), and, for
# several levels, Cho et al., "BlueConnect" (2019): reduce-scatter from the inner to the outer level, all-gather back.


class Share(NamedTuple):
    """Cost of a collective on a network level: number of sequential messages, and bytes one way on the busiest link.

    ``idle_bytes``: bytes whose transfer time passes without using the links, which are free for other transfers then.
    """

    level: int
    rounds: float
    bytes: float
    idle_bytes: float = 0.0


def split_collective(
    collective: str | None, size: float, dims: Sequence[tuple[int, int]], algorithm: str = "ring"
) -> list[Share] | None:
    """Compute the cost of a collective on each network level: sequential messages, and bytes on the busiest link.

    Args:
        size: bytes, as nccl-tests defines the size of the collective.
        dims: (level, number of units), innermost first.

    Returns:
        One share per level with more than one unit; None for an unknown collective.
    """
    dims = [(level, n) for level, n in dims if n > 1]
    if collective == "all_reduce":
        return [
            Share(share.level, 2 * share.rounds, 2 * share.bytes)
            for share in _split_scatter(size, dims, algorithm, reduces=True)
        ]
    if collective in ("reduce_scatter", "all_gather"):
        return _split_scatter(size, dims, algorithm, reduces=False)
    if collective in ("all_to_all", "gather", "scatter"):
        rounds = 1 if algorithm == "direct" or collective != "all_to_all" else None
        return [Share(level, rounds or n - 1, size * (n - 1) / n) for level, n in dims]
    if collective in ("broadcast", "reduce"):
        return [Share(level, math.ceil(math.log2(n)), size) for level, n in dims]
    if collective in ("message", "send", "recv", "send_recv"):
        return [Share(dims[-1][0], 1, size)] if dims else []
    return None


def _split_scatter(
    size: float, dims: Sequence[tuple[int, int]], algorithm: str, *, reduces: bool
) -> list[Share]:
    """Compute a reduce-scatter's or all-gather's cost per level; each level of n units divides the bytes by n."""
    shares = []
    for level, n in dims:
        rounds = {"ring": n - 1, "direct": 1}.get(algorithm, math.ceil(math.log2(n)))
        # A double binary tree sends the whole buffer up and down, half of it in each tree.
        moved = size if algorithm == "tree" and reduces else size * (n - 1) / n
        shares.append(Share(level, rounds, moved))
        size /= n
    return shares


def split_gloo(collective: str | None, size: float, dims: Sequence[tuple[int, int]]) -> list[Share] | None:
    """Compute the cost of a collective per network level as gloo runs it: in rings, a reduce-scatter as an all-reduce.

    With two ranks, an all-gather takes 1.5 times as long: the message by which the receiver announces its buffer waits
    behind the first half of the data on the same connection, and meanwhile the other direction is idle.
    """
    if collective == "reduce_scatter":
        return split_collective("all_reduce", size, dims)
    shares = split_collective(collective, size, dims)
    if collective == "all_gather" and shares and len(dims) == 1 and dims[0][1] == 2:
        return [share._replace(idle_bytes=0.5 * share.bytes) for share in shares]
    return shares


def find_dims(topology: Topology, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return (level index, number of units) for each level of a topology that a group of ranks spans, innermost first.

    The outermost level connects all units, even more than it was fitted to. If the members spread unevenly, the whole
    group communicates over the outermost of these levels.
    """
    dims, product = [], 1
    for level in range(len(topology.levels)):
        below = {topology.get_unit(rank, level) for rank in ranks}
        is_outermost = level + 1 == len(topology.levels)
        above = {0} if is_outermost else {topology.get_unit(rank, level + 1) for rank in ranks}
        if len(below) > len(above):
            dims.append((level, len(below) // len(above)))
            product *= dims[-1][1]
    return dims if product == len(set(ranks)) else [(dims[-1][0], len(set(ranks)))]


# Simulates transfers that share links: each link divides its bandwidth evenly among them (processor sharing).
#
# The backends on the host execute a limited number of communications of a process group at a time; others queue.


class Flow(NamedTuple):
    """Data that a transfer moves over ``links``; takes ``solo_ns`` if no other flow uses these links."""

    solo_ns: float
    links: tuple[int, ...]


class Transfer(NamedTuple):
    """A communication whose flows start together, ``latency_ns`` after the last rank has begun it.

    ``begins``: time at which each rank issues it. ``queues``: the queue of each rank that it passes, None for none.
    """

    begins: tuple[float, ...]
    queues: tuple[Hashable, ...]
    latency_ns: float
    flows: tuple[Flow, ...]


def share_links(transfers: Sequence[Transfer], workers: int = 2, efficiency: float = 1.0) -> list[float]:
    """Simulate transfers over shared links, and return the time (ns) at which each transfer completes.

    Args:
        workers: number of communications that a queue executes at a time.
        efficiency: share of a link's bandwidth that several transfers on it reach together.
    """
    return _LinkSharing(transfers, workers, efficiency).run()


class _Bundle:
    """All flows over the same set of links; they progress equally and therefore share a progress counter.

    ``progress``: the time, without other flows, of what each flow has transferred until ``since``. ``ends``: a heap
    with the progress at which a flow is complete, and its transfer.
    """

    __slots__ = ("ends", "links", "progress", "share", "since", "version")

    def __init__(self, links: tuple[int, ...]) -> None:
        self.links = links
        self.ends: list[tuple[float, int]] = []
        self.progress, self.since, self.share, self.version = 0.0, 0.0, 1.0, 0

    def advance(self, now: float) -> None:
        self.progress = self.progress + (now - self.since) * self.share if self.ends else 0.0
        self.since = now


class _LinkSharing:
    """An event simulation of transfers over shared links."""

    def __init__(self, transfers: Sequence[Transfer], workers: int, efficiency: float) -> None:
        self.transfers, self.workers, self.efficiency = transfers, workers, efficiency
        self.finish = [0.0] * len(transfers)
        self.missing = [len(transfer.begins) for transfer in transfers]
        self.flows_left = [len(transfer.flows) for transfer in transfers]
        self.bundles: dict[tuple[int, ...], _Bundle] = {}
        self.bundles_on_link: dict[int, list[_Bundle]] = defaultdict(list)
        self.users: dict[int, int] = defaultdict(int)  # flows on each link
        self.busy: dict[Hashable, int] = defaultdict(int)
        self.waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        self.events: list[tuple[float, int, str, int, _Bundle | None, int]] = []
        self.count = 0

    def run(self) -> list[float]:
        for number, transfer in enumerate(self.transfers):
            begins = list(enumerate(transfer.begins))
            if begins and not any(transfer.queues):  # only the last rank matters
                begins, self.missing[number] = [max(begins, key=itemgetter(1))], 1
            for part, begin in begins:
                self._push(begin, "begin", number, None, part)
        now = 0.0
        while self.events or self._release_blocked(now):
            time, _, kind, number, bundle, detail = heapq.heappop(self.events)
            if bundle is not None and bundle.version != detail:
                continue  # its share has changed since
            now = time
            if kind == "begin":
                self._enter(number, self.transfers[number].queues[detail], now)
            elif kind == "move":
                self._start_flows(number, now)
            elif bundle is not None:
                self._end_flow(bundle, now)
        return self.finish

    def _push(
        self, time: float, kind: str, number: int, bundle: _Bundle | None = None, detail: int = 0
    ) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, kind, number, bundle, detail))

    def _enter(self, number: int, queue: Hashable, now: float) -> None:
        """Issue a rank's part of a transfer; the part waits if all workers of its queue are busy."""
        if queue is None:
            self._participate(number, now)
        elif self.busy[queue] < self.workers:
            self.busy[queue] += 1
            self._participate(number, now)
        else:
            self.waiting[queue].append(number)

    def _participate(self, number: int, now: float) -> None:
        self.missing[number] -= 1
        if not self.missing[number]:
            self._push(now + self.transfers[number].latency_ns, "move", number)

    def _release_blocked(self, now: float) -> bool:
        """Start a waiting transfer when ranks deadlock because they queue transfers in different orders."""
        for queue in self.waiting.values():
            while queue:
                self._participate(queue.popleft(), now)
                if self.events:
                    return True
        return False

    def _start_flows(self, number: int, now: float) -> None:
        flows = self.transfers[number].flows
        if not flows:
            self._complete(number, now)
        for flow in flows:
            bundle = self._find_bundle(flow.links)
            bundle.advance(now)
            heapq.heappush(bundle.ends, (bundle.progress + flow.solo_ns, number))
            self._change_users(bundle, +1, now)

    def _find_bundle(self, links: tuple[int, ...]) -> _Bundle:
        bundle = self.bundles.get(links)
        if bundle is None:
            bundle = self.bundles[links] = _Bundle(links)
            for link in links:
                self.bundles_on_link[link].append(bundle)
        return bundle

    def _end_flow(self, bundle: _Bundle, now: float) -> None:
        bundle.advance(now)
        _, number = heapq.heappop(bundle.ends)
        self.flows_left[number] -= 1
        if not self.flows_left[number]:
            self._complete(number, now)
        self._change_users(bundle, -1, now)

    def _change_users(self, changed: _Bundle, change: int, now: float) -> None:
        """Update bandwidth shares and end times of all flows on a bundle's links when a flow of it begins or ends."""
        for link in changed.links:
            self.users[link] += change
        affected = {changed: None} | {
            other: None for link in changed.links for other in self.bundles_on_link[link]
        }
        for bundle in affected:
            if not bundle.ends:
                continue
            bundle.advance(now)
            users = max((self.users[link] for link in bundle.links), default=1)
            bundle.share = 1.0 if users == 1 else self.efficiency / users
            bundle.version += 1
            end, number = bundle.ends[0]
            self._push(
                now + max(end - bundle.progress, 0.0) / bundle.share, "end", number, bundle, bundle.version
            )

    def _complete(self, number: int, now: float) -> None:
        self.finish[number] = now
        for queue in self.transfers[number].queues:
            if queue is None:
                continue
            if self.waiting[queue]:
                self._participate(self.waiting[queue].popleft(), now)
            else:
                self.busy[queue] -= 1
