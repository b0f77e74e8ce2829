"""Waits between ranks: who waits for whom, and on whom all others depend."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

Waits = dict[int, set[int]]
"""Rank -> what it waits for: the negative numbers of calls, and call -> the ranks that have not made it.

Calls are nodes of their own, because half of 10,000 ranks may wait for the other half.
"""


def build_waits(table: pl.DataFrame) -> Waits:
    """Return the graph of waits, from missing calls: ranks point to the calls they wait in (numbers < 0), calls to the
    missing ranks."""
    waits: Waits = {}
    missing = table.filter(pl.col("finding") == "missing")
    for number, (ranks, others) in enumerate(missing.select("ranks", "others").iter_rows(), 1):
        if ranks and others:
            waits[-number] = set(ranks)
            for other in others:
                waits.setdefault(other, set()).add(-number)
    return waits


def find_roots(waits: Waits) -> list[set[int]]:
    """Return the sets of ranks that wait for no rank outside of the set: single ranks, or cycles of ranks."""
    components = _find_components(waits)
    component_of = {node: index for index, component in enumerate(components) for node in component}
    return [
        {node for node in component if node >= 0}
        for index, component in enumerate(components)
        if all(component_of[target] == index for node in component for target in waits.get(node, ()))
    ]


def find_waiting(waits: Waits, roots: set[int]) -> tuple[set[int], set[int]]:
    """Return the ranks that wait for the root ranks directly, and the ranks that wait for them through others."""
    sources: Waits = {}
    for node, targets in waits.items():
        for target in targets:
            sources.setdefault(target, set()).add(node)
    direct = {
        rank for root in roots for call in sources.get(root, ()) for rank in sources.get(call, ())
    } - roots
    reached, pending = set(roots), list(roots)
    while pending:
        for node in sources.get(pending.pop(), set()) - reached:
            reached.add(node)
            pending.append(node)
    return direct, {node for node in reached if node >= 0} - roots - direct


def _find_components(waits: Waits) -> list[set[int]]:
    """Return the strongly connected components of the graph of waits (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    components: list[set[int]] = []
    for start in sorted(waits):
        pending: list[tuple[int, Iterator[int]]] = [] if start in index else [(start, iter(()))]
        while pending:
            rank, targets = pending[-1]
            if rank not in index:
                index[rank] = low[rank] = len(index)
                stack.append(rank)
                on_stack.add(rank)
                targets = iter(sorted(waits.get(rank, set())))
                pending[-1] = (rank, targets)
            target = next((item for item in targets if item not in index or item in on_stack), None)
            if target is not None:
                if target in index:
                    low[rank] = min(low[rank], index[target])
                else:
                    pending.append((target, iter(())))
                continue
            pending.pop()
            if pending:
                low[pending[-1][0]] = min(low[pending[-1][0]], low[rank])
            if low[rank] == index[rank]:
                at = stack.index(rank)
                component = set(stack[at:])
                del stack[at:]
                on_stack -= component
                components.append(component)
    return components
