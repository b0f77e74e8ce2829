"""Times of collectives among ranks that are placed on the hosts of a cluster, for many layouts at a time.

Rank order: tensor parallelism is innermost, then context, data and pipeline parallelism; the ranks that share experts
are consecutive. The members of a group are thus ``stride`` ranks apart. The group has n members in a host and spans m
hosts.

A group inside a host costs what `NetworkModel.split` computes. The data of a reduction or gathering across hosts passes
all hosts in one ring, as NCCL's rings do: a host's link carries the bytes of a ring of all n x m members. Groups of one
axis communicate at the same time and share the rate of a host's network: each member contributes the rate of one device
(`Level.bytes_per_second`), so that the group has n of these rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from etloom.simulator.network.model import NetworkModel, find_dims, split_collective

Array = NDArray[np.float64]
_RINGS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class PlacedNetwork:
    """The network of a cluster on which groups of ranks are placed.

    Attributes:
        model: the levels, the innermost of which joins the devices of a host.
        measured: number of ranks -> sizes (bytes) and times (s) of measured all-reduces inside a host; they replace the
            model.
    """

    model: NetworkModel
    measured: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)

    def compute_times(
        self, collective: str, size: Array | float, ranks: Array | float, stride: Array | float = 1.0
    ) -> Array:
        """Return the time (s) of a collective in each layout, while all groups of its axis communicate.

        Args:
            collective: as `split_collective` calls it; of a message, the group is that of all pipeline stages.
            size: bytes, as nccl-tests defines the size of the collective.
            ranks: members of a group; a group of one takes no time.
            stride: distance of its members.
        """
        size, ranks, stride = np.broadcast_arrays(
            np.asarray(size, float), np.asarray(ranks, float), np.asarray(stride, float)
        )
        keys, index = np.unique(ranks.astype(np.int64) << 24 | stride.astype(np.int64), return_inverse=True)
        groups = [(int(key) >> 24, int(key) & 0xFFFFFF) for key in keys]
        costs = np.array([_group_cost(self.model, collective, *group) for group in groups])
        latency, per_byte = costs[index.reshape(size.shape)].transpose(-1, *range(size.ndim))
        seconds = latency + per_byte * size
        if collective == "all_reduce" and self.measured:
            host = self.model.topology.levels[0].size
            for count, (sizes, times) in self.measured.items():
                inside = np.interp(np.minimum(size, sizes[-1]), sizes, times) * np.maximum(
                    size / sizes[-1], 1
                )
                is_inside = (ranks == count) & ((ranks - 1) * stride < host)
                seconds = np.where(is_inside, inside, seconds)
        return np.asarray(seconds)


@cache
def _group_cost(model: NetworkModel, collective: str, ranks: int, stride: int) -> tuple[float, float]:
    """Return the latency (s) of a collective in the first group of an axis, and the time (s) of each further byte."""
    if ranks < 2:
        return 0.0, 0.0
    last = (ranks - 1) * stride
    # Of the pairs of neighboring stages, one that crosses a host's border is the slowest.
    members = [0, last] if collective == "message" else list(range(0, last + 1, stride))
    shares = model.split(collective, 1, members, "device")
    if shares is None:
        raise ValueError(f"unknown collective {collective!r}")
    if collective not in _RINGS:
        return model.latency_ns(shares) / 1e9, max(map(model.data_ns, shares)) / 1e9
    per_byte, inside = 0.0, 1
    for level, units in find_dims(model.topology, members):
        (ring,) = split_collective(collective, 1, [(level, ranks)], model.algorithm) or []
        per_byte = max(per_byte, model.data_ns(ring) / inside)
        inside *= units
    return model.latency_ns(shares) / 1e9, per_byte / 1e9
