"""Network model: effective bandwidth and latency by level, and the transfer times of communications.

`NetworkModel.compute_times` gives the times of many groups of ranks while all groups of their axis communicate,
`TransferTimes` those of a scenario's communications, which share links at each moment as its ranks use them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.simulator.network.placement import Share, place_group, split_collective
from etloom.simulator.network.topology import Topology
from etloom.simulator.scenario import Communications

Array = NDArray[np.float64]

HOST_WORKERS = 2
"""Communications of a process group that gloo executes at a time (its default number of threads)."""

RING_DIRECTIONS = {"all_gather": 1, "all_reduce": -1, "reduce_scatter": -1}
"""Collective of gloo -> the neighbor in the ring to which a rank sends. Two collectives of different directions reach
less than the rate of a link together, since the message by which a rank announces its buffer for one of them waits
behind the data of the other one on the same connection. Two of the same direction have all of the rate."""


@dataclass(frozen=True)
class NetworkModel:
    """A network model: topology with effective bandwidths, efficiency of shared links, and buffers of messages.

    Attributes:
        topology: the levels; their bandwidth times their efficiency is what transfers reach.
        sharing_efficiency: share of a link's bandwidth that several transfers on it reach together; rings of gloo in
            the same direction reach all of it.
        buffer_bytes: the sender of a message continues when no more than these are left to transfer.
        measured: number of ranks -> sizes (bytes) and times (s) of measured all-reduces inside a host; `compute_times`
            takes them instead of the model.
    """

    topology: Topology
    sharing_efficiency: float = 1.0
    buffer_bytes: float = 0.0
    measured: Mapping[int, tuple[Array, Array]] = field(default_factory=dict, compare=False)

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

    def split(
        self,
        collective: str | None,
        size: float,
        ranks: Sequence[int],
        side: str = "device",
        *,
        exclusive: bool = False,
    ) -> list[Share] | None:
        """Return the cost of a communication on each network level (`split_collective`)."""
        placement = place_group(self.topology, tuple(ranks), exclusive=exclusive)
        return split_collective(collective, size, placement, side)

    def time_ns(self, collective: str | None, size: float, ranks: Sequence[int]) -> float | None:
        """Return the time (ns) of a communication of devices while all devices of their hosts communicate likewise.

        None if its algorithm is unknown. A group of one rank takes no time.
        """
        shares = self.split(collective, size, ranks)
        return (
            None if shares is None else self.latency_ns(shares) + max(map(self.data_ns, shares), default=0.0)
        )

    def compute_times(
        self, collective: str, size: Array | float, ranks: Array | float, stride: Array | float = 1.0
    ) -> Array:
        """Return the time (s) of a collective in each layout, while all groups of its axis communicate.

        Args:
            collective: as `split_collective` names it; of a message, the group is that of all pipeline stages.
            size: bytes, as nccl-tests defines the size of the collective.
            ranks: members of a group; a group of one takes no time.
            stride: distance of its members.
        """
        size, ranks, stride = np.broadcast_arrays(
            np.asarray(size, float), np.asarray(ranks, float), np.asarray(stride, float)
        )
        keys, index = np.unique(ranks.astype(np.int64) << 24 | stride.astype(np.int64), return_inverse=True)
        groups = [(int(key) >> 24, int(key) & 0xFFFFFF) for key in keys]
        costs = np.array([_price_group(self, collective, *group) for group in groups])
        latency, per_byte = costs[index.reshape(size.shape)].transpose(-1, *range(size.ndim))
        seconds = latency + per_byte * size
        if collective == "all_reduce" and self.measured:
            host = self.topology.levels[0].size
            for count, (sizes, times) in self.measured.items():
                inside = np.interp(np.minimum(size, sizes[-1]), sizes, times) * np.maximum(
                    size / sizes[-1], 1
                )
                is_inside = (ranks == count) & ((ranks - 1) * stride < host)
                seconds = np.where(is_inside, inside, seconds)
        return np.asarray(seconds)

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


@cache
def _price_group(model: NetworkModel, collective: str, ranks: int, stride: int) -> tuple[float, float]:
    """Return the latency (s) of a collective in the first group of an axis, and the time (s) of each further byte."""
    last = max(ranks - 1, 0) * stride
    # Of the pairs of neighboring stages, one that crosses a host's border is the slowest.
    members = [0, last] if collective == "message" else list(range(0, last + 1, stride))
    latency, total = (model.time_ns(collective, size, members) for size in (0, 1))
    if latency is None or total is None:
        raise ValueError(f"unknown collective {collective!r}")
    return latency / 1e9, (total - latency) / 1e9


class TransferTimes:
    """Computes when the communications of a scenario complete on a network whose links they share.

    Attributes:
        instances: numbers of the communications whose time the network determines, in the order of the results.
        solo_ns: the time of each if no other transfer uses its links.
        unknown: communications of unknown size or algorithm, which keep their time.
        stays: part of the time of its transfer that each participation takes: less than 1 for the sender of a message,
            which continues when the rest is in buffers.
    """

    def __init__(self, communications: Communications, network: NetworkModel) -> None:
        table, parts = communications.instances, communications.participations
        self._sharing_efficiency = network.sharing_efficiency
        sized = table.filter(pl.col("bytes").is_not_null() & (pl.col("group_size") > 1))
        splits: dict[tuple[object, ...], list[Share] | None] = {}
        self._topology, self._fixed = network.topology, list[_Fixed]()
        placed, stay_shares = [], []
        for instance, collective, size, members, group, side in sized.select(
            "instance", "collective", "bytes", "ranks", "group", "where"
        ).iter_rows():
            key = (collective, size, tuple(members), side)
            if key not in splits:
                splits[key] = network.split(collective, size, members, side, exclusive=True)
            shares = splits[key]
            if shares is None:
                continue
            placed.append(instance)
            is_message = collective == "message" and len(members) == 2
            stay_shares.append(max(1 - network.buffer_bytes / max(size, 1), 0.0) if is_message else 1.0)
            data = tuple((network.data_ns(share), share.level) for share in shares)
            queue = group if side == "host" and not is_message else None
            direction = RING_DIRECTIONS.get(collective) if side == "host" else None
            if direction is not None and len(members) == 2:
                direction = 0  # both neighbors are the same rank
            self._fixed.append(
                _Fixed(network.latency_ns(shares), data, tuple(members), is_message, queue, direction)
            )
        self.instances = np.array(placed, np.int64)
        self.solo_ns = np.array(
            [fixed.latency_ns + max((time for time, _ in fixed.data), default=0.0) for fixed in self._fixed]
        )
        self.unknown = table.height - len(placed)
        self._is_host = np.isin(self.instances, table.filter(where="host")["instance"].to_numpy())
        self._find_participations(parts)
        senders = np.array([fixed.members[0] if fixed.is_message else -1 for fixed in self._fixed], np.int64)
        is_sender = senders[self.place] == np.array(self._ranks, np.int64)
        self.stays = np.where(is_sender, np.array(stay_shares)[self.place], 1.0)
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
        """Number the links that transfers use; links that carry the same transfers have a common number.

        A network card has a link in each direction. A message uses one direction of either card, a collective both.
        """
        uses: dict[tuple[int, tuple[int, ...], bool], set[tuple[int, int, bool]]] = {}
        on_link: dict[tuple[int, int, bool], set[int]] = defaultdict(set)
        for fixed in self._fixed:
            for _, level in fixed.data:
                key = (level, fixed.members, fixed.is_message)
                if key in uses:
                    continue
                devices = self._topology.count_card_devices(level)
                uses[key] = {
                    (level, rank // devices, is_out)
                    for place, rank in enumerate(fixed.members)
                    for is_out in ((place == 0,) if fixed.is_message else (False, True))
                }
                for link in uses[key]:
                    on_link[link].add(len(uses))
        numbers: dict[frozenset[int], int] = {}
        number = {link: numbers.setdefault(frozenset(users), len(numbers)) for link, users in on_link.items()}
        links = {key: tuple(sorted({number[link] for link in used})) for key, used in uses.items()}
        self._flows = [
            tuple(
                Flow(solo_ns, links[level, fixed.members, fixed.is_message], fixed.direction)
                for solo_ns, level in fixed.data
            )
            for fixed in self._fixed
        ]

    def finish(self, begins: np.ndarray) -> np.ndarray:
        """Return the time (ns) at which each communication completes when transfers share links.

        Args:
            begins: time at which each of ``parts`` begins, ns.
        """
        values = begins.astype(float).tolist()
        transfers = []
        for number, fixed in enumerate(self._fixed):
            low, high = self._bounds[number : number + 2]
            ranks, workers = self._ranks[low:high], HOST_WORKERS
            queues: tuple[Hashable, ...] = (None,) * (high - low)
            connection = None
            if fixed.is_message:  # in order on a connection
                queues, workers = tuple((rank, fixed.members) for rank in ranks), 1
                connection = fixed.members if self._is_host[number] else None
            elif self._is_host[number]:
                queues = tuple((rank, fixed.group) for rank in ranks)
            arrivals = tuple(values[low:high])
            transfers.append(
                Transfer(arrivals, queues, fixed.latency_ns, self._flows[number], workers, connection)
            )
        return np.array(share_links(transfers, self._sharing_efficiency))


class _Fixed(NamedTuple):
    """A communication apart from its begin: ``data`` has the time alone and the level of each flow."""

    latency_ns: float
    data: tuple[tuple[float, int], ...]
    members: tuple[int, ...]
    is_message: bool
    group: str | None
    direction: int | None


# Simulates transfers that share links: each link divides its bandwidth evenly among them (processor sharing).
#
# The backends on the host execute a limited number of communications of a process group at a time; others queue.


class Flow(NamedTuple):
    """Data that a transfer moves over ``links``; takes ``solo_ns`` if no other flow uses these links.

    ``direction``: flows of the same direction share links without a loss of rate; None: always with a loss.
    """

    solo_ns: float
    links: tuple[int, ...]
    direction: int | None = None


class Transfer(NamedTuple):
    """A communication whose flows start together, ``latency_ns`` after the last rank has begun it.

    ``begins``: time at which each rank issues it. ``queues``: the queue of each rank that it passes, None for none.
    ``workers``: number of communications that these queues execute at a time. ``connection``: sender and receiver
    of a message of gloo. The receiver announces its buffer on the same connection, behind the data that it sends.
    """

    begins: tuple[float, ...]
    queues: tuple[Hashable, ...]
    latency_ns: float
    flows: tuple[Flow, ...]
    workers: int = HOST_WORKERS
    connection: tuple[int, ...] | None = None


def share_links(transfers: Sequence[Transfer], efficiency: float = 1.0) -> list[float]:
    """Simulate transfers over shared links, and return the time (ns) at which each transfer completes.

    Args:
        efficiency: share of a link's bandwidth that several transfers on it reach together.
    """
    return _LinkSharing(transfers, efficiency).run()


class _Bundle:
    """All flows over the same links in the same direction; they progress equally and share a progress counter.

    ``progress``: the time, without other flows, of what each flow has transferred until ``since``. ``ends``: a heap
    with the progress at which a flow is complete, and its transfer.
    """

    __slots__ = ("direction", "ends", "links", "progress", "share", "since", "version")

    def __init__(self, flow: Flow) -> None:
        self.links, self.direction = flow.links, flow.direction
        self.ends: list[tuple[float, int]] = []
        self.progress, self.since, self.share, self.version = 0.0, 0.0, 1.0, 0

    def advance(self, now: float) -> None:
        self.progress = self.progress + (now - self.since) * self.share if self.ends else 0.0
        self.since = now


class _LinkSharing:
    """An event simulation of transfers over shared links."""

    def __init__(self, transfers: Sequence[Transfer], efficiency: float) -> None:
        self.transfers, self.efficiency = transfers, efficiency
        self.finish = [0.0] * len(transfers)
        self.missing = [len(transfer.begins) for transfer in transfers]
        self.flows_left = [len(transfer.flows) for transfer in transfers]
        self.bundles: dict[tuple[tuple[int, ...], int | None], _Bundle] = {}
        self.bundles_on_link: dict[int, list[_Bundle]] = defaultdict(list)
        self.users: dict[int, int] = defaultdict(int)  # flows on each link
        self.lossy: dict[int, bool] = defaultdict(bool)  # whether flows on each link reach less than its rate
        self.busy: dict[Hashable, int] = defaultdict(int)
        self.waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        self.moving: dict[
            tuple[int, ...] | None, int
        ] = {}  # the last message on each connection that has started
        self.blockers: dict[int, int] = {}  # message -> the one before the announcement of its buffer
        self.followers: dict[int, list[int]] = defaultdict(list)
        self.complete: set[int] = set()
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
                queue = self.transfers[number].queues[detail]
                self._announce_buffer(number, queue)
                self._enter(number, queue, now)
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
        elif self.busy[queue] < self.transfers[number].workers:
            self.busy[queue] += 1
            self._participate(number, now)
        else:
            self.waiting[queue].append(number)

    def _participate(self, number: int, now: float) -> None:
        self.missing[number] -= 1
        if self.missing[number]:
            return
        blocker = self.blockers.get(number)
        if blocker is None or blocker in self.complete:
            self._push(now + self.transfers[number].latency_ns, "move", number)
        else:
            self.followers[blocker].append(number)

    def _announce_buffer(self, number: int, queue: Hashable) -> None:
        """Find the message behind which the receiver of a message announces its buffer, if one is moving."""
        connection = self.transfers[number].connection
        if connection is not None and queue == (connection[1], connection):
            blocker = self.moving.get(connection[::-1])
            if blocker is not None and blocker not in self.complete:
                self.blockers[number] = blocker

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
        self.moving[self.transfers[number].connection] = number
        if not flows:
            self._complete(number, now)
        for flow in flows:
            bundle = self._find_bundle(flow)
            bundle.advance(now)
            heapq.heappush(bundle.ends, (bundle.progress + flow.solo_ns, number))
            self._change_users(bundle, +1, now)

    def _find_bundle(self, flow: Flow) -> _Bundle:
        key = flow.links, flow.direction
        bundle = self.bundles.get(key)
        if bundle is None:
            bundle = self.bundles[key] = _Bundle(flow)
            for link in flow.links:
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
            directions = {bundle.direction for bundle in self.bundles_on_link[link] if bundle.ends}
            self.lossy[link] = len(directions) > 1 or None in directions
        affected = {changed: None} | {
            other: None for link in changed.links for other in self.bundles_on_link[link]
        }
        for bundle in affected:
            if not bundle.ends:
                continue
            bundle.advance(now)
            users = max((self.users[link] for link in bundle.links), default=1)
            is_lossy = users > 1 and any(self.lossy[link] for link in bundle.links)
            bundle.share = (self.efficiency if is_lossy else 1.0) / users
            bundle.version += 1
            end, number = bundle.ends[0]
            self._push(
                now + max(end - bundle.progress, 0.0) / bundle.share, "end", number, bundle, bundle.version
            )

    def _complete(self, number: int, now: float) -> None:
        self.finish[number] = now
        self.complete.add(number)
        for follower in self.followers.pop(number, ()):
            self._push(now + self.transfers[follower].latency_ns, "move", follower)
        for queue in self.transfers[number].queues:
            if queue is None:
                continue
            if self.waiting[queue]:
                self._participate(self.waiting[queue].popleft(), now)
            else:
                self.busy[queue] -= 1
