"""Computes the cost of collective algorithms per network level: sequential messages, and bytes on the busiest link.

A collective on n ranks with S bytes (as nccl-tests defines them) takes ``rounds`` messages in sequence and moves
``bytes`` over the busiest link in one direction; alone on its links it takes rounds x latency + bytes / bandwidth.
See Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), and, for
several levels, Cho et al., "BlueConnect" (2019): reduce-scatter from the inner to the outer level, all-gather back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from etloom.simulator.network.topology import Topology

ALGORITHMS = ("ring", "direct", "halving-doubling", "tree")


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
