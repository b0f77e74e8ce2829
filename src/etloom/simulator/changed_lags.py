"""The lags (times on the edges) of a dependency graph after changes, computed only for the edges that are requested.

A broad change concerns millions of edges. A prediction needs sums over them and a few single lags, so the array of all
lags is computed only on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from etloom import _native
from etloom.graphs.algorithms import REMOVED_LAG
from etloom.graphs.contraction import ChainLags, ContractedGraph, GroupedEdges
from etloom.graphs.graph import Graph, Int32Array, Int64Array, UInt8Array
from etloom.simulator.changes import Change
from etloom.simulator.edge_selection import Selection

_CHUNK_EDGES = 1 << 15
"""Number of edges that are computed at a time, so that their arrays stay in the processor's cache."""

_MAX_REPEATED_STEPS = 4
"""Changes that are applied again to each edge that is read; with more, the lags of all edges are kept."""


class Lags(NamedTuple):
    """Lags of edges, int64 ns: minimum latency, and unexplained delay at the upper and at the lower bound."""

    min_latency: Int64Array
    upper: Int64Array
    lower: Int64Array

    def take(self, rows: Int64Array) -> Lags:
        """Return the lags of the edges at the positions ``rows``."""
        return Lags(*(part[rows] for part in self))

    def sum_times(self, *, upper: bool = False) -> float:
        """Return the sum of all lags (ns) at the upper or the lower bound; removed edges count 0."""
        delay = self.upper if upper else self.lower
        latencies = np.maximum(self.min_latency, 0).sum(dtype=np.float64)
        return float(latencies + delay.sum(dtype=np.float64))


class LagStep(Protocol):
    """A change of edge lags; ``edges``: the numbers of the edges that it changes, ascending."""

    @property
    def edges(self) -> Int32Array: ...

    def find(self, edges: Int32Array) -> Int64Array:
        """Return the positions in ``edges`` of the edges that the step changes."""

    def compute(self, before: Lags, edges: Int32Array) -> Lags:
        """Return the new lags of ``edges`` (all changed by this step), computed from ``before``, the previous lags."""


@dataclass(frozen=True, eq=False)
class SetLags:
    """A change that replaces the lags of some edges by precomputed values."""

    edges: Int32Array
    lags: Lags

    def find(self, edges: Int32Array) -> Int64Array:
        """Return the positions in ``edges`` of the edges whose lags are replaced."""
        if not self.edges.size:
            return np.zeros(0, np.int64)
        rows = np.minimum(np.searchsorted(self.edges, edges), len(self.edges) - 1)
        return np.flatnonzero(self.edges[rows] == edges)

    def compute(self, before: Lags, edges: Int32Array) -> Lags:
        """Return the precomputed lags of ``edges``; ``before`` is not used."""
        return self.lags.take(np.searchsorted(self.edges, edges))


@dataclass(frozen=True, eq=False)
class ScaleLags:
    """A user's change (multiply, set or add) of the selected edges' minimum latencies and of their removable delays.

    ``selection``: its edges. ``kinds``: of the edges of the graph. ``usual_delays``: by kind, the delay that may
    disappear, ns.
    """

    selection: Selection
    change: Change
    kinds: UInt8Array
    usual_delays: Int64Array

    @property
    def edges(self) -> Int32Array:
        """The numbers of the selected edges, ascending; computed on first access."""
        return self.selection.edges

    def find(self, edges: Int32Array) -> Int64Array:
        """Return the positions in ``edges`` of the edges that are selected."""
        return self.selection.find(edges)

    def compute(self, before: Lags, edges: Int32Array) -> Lags:
        """Return the lags of ``edges`` after the change; an edge that an earlier change removed stays removed."""
        min_latency = _change_latencies(self.change, before.min_latency)
        removable = self.get_removable(before, edges)
        if self.change.plus_ns is None:
            lower = scale_lags(removable, self.change.times or 0.0) + (before.lower - removable)
        else:
            lower = before.lower
        removed = before.min_latency == REMOVED_LAG
        if removed.any():
            min_latency = np.where(removed, REMOVED_LAG, min_latency)
            lower = np.where(removed, before.lower, lower)
        return Lags(min_latency, before.upper, lower)

    def change_recorded(
        self,
        contraction: ContractedGraph,
        upper: ChainLags,
        lower: ChainLags,
        groups: GroupedEdges | None = None,
    ) -> tuple[int, float]:
        """Apply the change to the recorded lags of the contracted graph's chains, in place; same result as `compute`.

        Args:
            contraction: the contracted graph.
            upper: the lags of its chains, for the upper bound.
            lower: for the lower bound.
            groups: all edges of the target, for a selection of a whole one.

        Returns:
            The delay of the lower bound that may not disappear, and the difference of the sums of its times, ns.
        """
        graph, change, longer = contraction.graph, self.change, 0
        if groups is None or change.times is None or change.times >= groups.MAX_FACTOR:
            edges = self.edges
        else:
            longer = groups.scale(change.times, self.selection.marked, upper, lower)
            edges = self.selection.filter(groups.others)
        residual, before, after = _native.scale_chains(
            contraction.chain,
            contraction.last,
            edges,
            graph.min_latency,
            graph.unexplained,
            self.kinds,
            self.usual_delays,
            change.times,
            change.to_ns,
            change.plus_ns or 0,
            upper.total,
            upper.last_edges,
            lower.total,
        )
        return residual, longer + after - before

    def get_removable(self, before: Lags, edges: Int32Array) -> Int64Array:
        """Return the part of the unexplained delay of each edge that may disappear in the lower bound, ns."""
        return np.asarray(np.minimum(before.lower, self.usual_delays[self.kinds[edges]]))


class ChangedLags:
    """The lags of a dependency graph after a sequence of changes (`LagStep`).

    After a few changes, the lags of all edges are kept: to repeat all changes for each new one takes quadratic time.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._steps: list[LagStep] = []
        self._current: Lags | None = None

    @property
    def is_recorded(self) -> bool:
        """True if there is no change, so that all lags are those of the recording."""
        return not self._steps and self._current is None

    def append(self, step: LagStep) -> None:
        """Append a change of lags, which applies after the previous changes."""
        if self._current is not None:
            _apply(step, self._current)
            return
        self._steps.append(step)
        if len(self._steps) > _MAX_REPEATED_STEPS:
            self._current = self.read_all()
            self._steps.clear()

    def add(self, step: LagStep) -> Iterator[tuple[Int32Array, Lags, Lags]]:
        """Yield chunks of the edges that a change modifies, with lags before and after it; then append the change."""
        for low in range(0, len(step.edges), _CHUNK_EDGES):
            edges = step.edges[low : low + _CHUNK_EDGES]
            before = self.read(edges)
            yield edges, before, step.compute(before, edges)
        self.append(step)

    def read(self, edges: Int32Array) -> Lags:
        """Return the lags of the edges ``edges`` after all changes."""
        if self._current is not None:
            return self._current.take(edges.astype(np.int64))
        delays = self._graph.unexplained[edges]
        lags = Lags(self._graph.min_latency[edges], delays, delays.copy())
        for step in self._steps:
            changed = step.find(edges)
            if changed.size:
                _put(lags, changed, step.compute(lags.take(changed), edges[changed]))
        return lags

    def read_all(self) -> Lags:
        """Return the lags of all edges of the graph after all changes, as new arrays."""
        if self._current is not None:
            return Lags(*(part.copy() for part in self._current))
        graph = self._graph
        lags = Lags(graph.min_latency.copy(), graph.unexplained.copy(), graph.unexplained.copy())
        for step in self._steps:
            _apply(step, lags)
        return lags


def _apply(step: LagStep, lags: Lags) -> None:
    """Change the lags of all edges of a graph in place."""
    edges = step.edges.astype(np.int64)
    _put(lags, edges, step.compute(lags.take(edges), step.edges))


def _put(lags: Lags, rows: Int64Array, values: Lags) -> None:
    for part, new in zip(lags, values, strict=True):
        part[rows] = new


def _change_latencies(change: Change, before: Int64Array) -> Int64Array:
    """Return the minimum latencies ``before`` (ns) after a user's change: multiplied, set or increased."""
    if change.times is not None:
        return scale_lags(before, change.times)
    if change.to_ns is not None:
        return np.full(len(before), change.to_ns, np.int64)
    return np.asarray(np.maximum(before + (change.plus_ns or 0), 0))


def resize_calls(change: Change, calls: Int64Array, edges: Int32Array, before: Lags) -> SetLags:
    """Return a change that sets or increases the time of calls, in which the pieces of a call keep their proportions.

    Args:
        change: sets a time, or adds to it.
        calls: the call that each edge is a piece of.
        edges: the numbers of the edges, ascending.
        before: the lags of the edges.
    """
    order = np.argsort(calls, kind="stable")
    latency = before.min_latency[order]
    first = np.flatnonzero(np.diff(calls[order], prepend=calls.min() - 1))
    total = np.add.reduceat(latency, first)
    wanted = total + change.plus_ns if change.plus_ns is not None else np.full(len(total), change.to_ns)
    sizes = np.diff(np.append(first, len(order)))
    passed = np.cumsum(latency) - np.repeat(np.cumsum(total) - total, sizes)
    shares = passed / np.repeat(np.maximum(total, 1), sizes)
    shares[np.repeat(total == 0, sizes)] = 1.0  # a call that took no time gets it all in its first piece
    ends = np.round(shares * np.repeat(np.maximum(wanted, 0), sizes)).astype(np.int64)
    ends_before = np.concatenate([[0], ends[:-1]])
    ends_before[first] = 0
    latencies = np.empty_like(before.min_latency)
    latencies[order] = ends - ends_before
    return SetLags(edges, Lags(latencies, before.upper, before.lower))


def scale_lags(lag: Int64Array, factor: float) -> Int64Array:
    """Return lags (ns) times a factor, rounded to whole ns and limited to +-2**62, which the engine rejects as too
    large."""
    return np.asarray(np.round(np.clip(lag * factor, -(2.0**62), 2.0**62)), dtype=np.int64)
