"""Network model: effective bandwidth and latency by level, and the transfer times of a scenario's communications."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from etloom.simulator.network.algorithms import Share, find_dims, split_collective, split_gloo
from etloom.simulator.network.sharing import Flow, Transfer, share_links
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
