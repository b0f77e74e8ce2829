"""Costs of communications by the placement of their ranks on the units (hosts, racks) of a network.

Ranks are numbered host by host. A level of the network joins units of the level below; a group spans a level if it has
members in several of these units. A collective on n ranks with S bytes (as nccl-tests defines them) takes ``rounds``
messages in sequence on each level that it spans, and moves ``bytes`` over the busiest link in one direction.

- Rings (reductions, gathers, broadcasts) pass all units. A group with k members in each host runs k rings at a time, as
  NCCL does, and each ring enters a host through another network card: the group has k times the rate of one device. A
  ring of gloo has one connection between two hosts.
- In an all-to-all each member sends to those in other units; a message takes the outermost level between its ends.
- Latency: a group exchanges messages inside the units first (Cho et al., "BlueConnect", 2019).

See Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from etloom.simulator.network.topology import Topology


class Share(NamedTuple):
    """Cost of a communication on a network level: number of sequential messages, and bytes that one device would send.

    ``idle_bytes``: bytes whose transfer time passes without using the links, which are free for other transfers then.
    """

    level: int
    rounds: float
    bytes: float
    idle_bytes: float = 0.0


class Spread(NamedTuple):
    """The members of a group on a level that it spans.

    ``units``: the most units that the level joins for it. ``rates``: rates of a device with which the members of a unit
    reach other units, where they are fewest. ``peers``: the most members in other units for any member. ``crowd``: that
    many members use the rate of one device.
    """

    level: int
    units: int
    rates: float
    peers: int
    crowd: float


@dataclass(frozen=True)
class Placement:
    """The placement of a group: number of its members, and the levels that it spans, innermost first."""

    members: int
    spreads: tuple[Spread, ...]


@lru_cache(maxsize=1 << 14)
def place_group(topology: Topology, ranks: tuple[int, ...], *, exclusive: bool = False) -> Placement:
    """Return the placement of a group of ranks.

    Args:
        topology: the network; its outermost level connects all units, even more than its size.
        ranks: the members.
        exclusive: the group has the cards of its members for itself; else all devices of a unit share its cards.
    """
    members, spreads = np.unique(np.array(ranks, np.int64)), []
    for number, level in enumerate(topology.levels):
        units, counts = np.unique(members // topology.count_devices(number), return_counts=True)
        is_outermost = number + 1 == len(topology.levels)
        above = np.zeros_like(units) if is_outermost else units // level.size
        _, parents, joined = np.unique(above, return_inverse=True, return_counts=True)
        crosses = joined[parents] > 1
        if not crosses.any():
            continue
        peers = np.bincount(parents, counts)[parents] - counts
        rates, crowd = float(counts[crosses].min()), 1.0
        if exclusive:
            devices = topology.count_card_devices(number)
            cards, users = np.unique(members // devices, return_counts=True)
            card_units = cards * devices // topology.count_devices(number)
            used = np.bincount(np.searchsorted(units, card_units))
            rates, crowd = float(used[crosses].min() * devices), float(users.max() / devices)
        spreads.append(Spread(number, int(joined.max()), rates, int(peers.max()), crowd))
    return Placement(len(members), tuple(spreads))


_RINGS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""Collective -> passes of its data around the ring."""


def split_collective(
    collective: str | None, size: float, placement: Placement, side: str = "device"
) -> list[Share] | None:
    """Return the cost of a communication on each level that its group spans; None if its algorithm is unknown.

    gloo executes a reduce-scatter as an all-reduce. In its all-gather, the message by which a rank announces its buffer
    waits behind the first of the 2 (n - 1) chunks that it sends, and meanwhile links are idle: for the whole chunk with
    two ranks, which have one connection, for about half of it with more, where only the card is common.

    Args:
        collective: its name (all_reduce, message, ...).
        size: bytes, as nccl-tests defines the size of the collective.
        placement: of the group.
        side: "host": executed by gloo.
    """
    members, shares = placement.members, []
    is_host = side == "host"
    passes = _RINGS.get("all_reduce" if is_host and collective == "reduce_scatter" else collective or "")
    for level, units, rates, peers, crowd in placement.spreads:
        rings = 1.0 if is_host else rates
        if passes:
            moved = passes * size * (members - 1) / members / rings
            shares.append(Share(level, passes * (units - 1), moved))
        elif collective in ("broadcast", "reduce"):
            shares.append(Share(level, math.ceil(math.log2(units)), size / rings))
        elif collective in ("all_to_all", "gather", "scatter"):
            rounds = units - 1 if collective == "all_to_all" else 1
            shares.append(Share(level, rounds, size * peers / members * crowd))
        elif collective in ("message", "send", "recv", "send_recv"):
            shares = [Share(level, 1, size * crowd)]
        else:
            return None
    if is_host and collective == "all_gather":
        idle = (1.0 if members == 2 else 0.5) / (2 * (members - 1))
        return [share._replace(idle_bytes=idle * share.bytes) for share in shares]
    return shares
