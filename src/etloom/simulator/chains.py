"""Contracts the graph of a prediction scenario to about a tenth of its points, whose times stay the same.

Chains of edges of one basis become one edge (`graphs.contraction`). Points stay that a prediction reads: the first and
last ones of ranks and steps, the starts of step annotations, and both ends of each communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.graphs.contraction import ContractedGraph, contract_graph
from etloom.graphs.graph import Graph, Int64Array, UInt8Array
from etloom.simulator.durations import Durations, find_step_starts
from etloom.simulator.extremes import Extremes, find_extremes, renumber_extremes
from etloom.simulator.scenario import Communications, Scenario

_POINTS, _EDGES = ("begin", "finish"), ("own_edge", "transfer_edge")


@dataclass(frozen=True, eq=False)
class ChainScenario:
    """A scenario on a contracted graph, in which each edge stands for a chain of edges of the dependency graph.

    Attributes:
        scenario: its points are the kept ones; its edges are chains of one basis.
        whole: the scenario on the whole graph.
        contraction: the chain of each edge.
        extremes: the extreme points, as positions in the kept ones.
    """

    scenario: Scenario
    whole: Scenario
    contraction: ContractedGraph
    extremes: Extremes

    @cached_property
    def durations(self) -> Durations:
        """The durations of the run, its ranks and its steps, from the times of the contracted graph's points."""
        return Durations(self.scenario, self.extremes)

    def expand(self, changed: Scenario) -> Scenario:
        """Return ``changed`` (``scenario`` with other communication lags) on the whole, uncontracted graph."""
        chains = np.flatnonzero(changed.lag != self.scenario.lag)
        lag = self.whole.lag.copy()
        lag[self.contraction.last[chains]] = changed.lag[chains]  # each of them is a single edge
        return changed.replace(
            graph=self.whole.graph,
            lag=lag,
            start=self.whole.start,
            basis=changed.basis[self.contraction.chain],
            communications=self.whole.communications,
        )


def contract_scenario(scenario: Scenario, extremes: Extremes | None = None) -> ChainScenario:
    """Return the scenario on a contracted graph, in which a chain of edges with the same `Basis` is a single edge.

    Args:
        extremes: the extreme points of its graph, if known; they are the same whichever lags change.
    """
    graph, parts = scenario.graph, scenario.communications.participations
    if extremes is None:
        extremes = find_extremes(graph, scenario.recorded, scenario.template, scenario.lag)
    anchors = extremes.mask.copy()
    anchors[find_step_starts(scenario)["point"].to_numpy()] = True
    anchors[parts.select(_POINTS).to_numpy().ravel()] = True
    edges = parts.select(_EDGES).to_numpy().ravel()
    edges = edges[edges >= 0]
    anchors[graph.source[edges]] = True
    anchors[np.searchsorted(graph.first, edges, side="right") - 1] = True
    _mark_changes_of_basis(graph, scenario.basis, anchors)
    contraction = contract_graph(graph, anchors)
    points, last = contraction.points, contraction.last
    lag = contraction.sum_lags(scenario.lag).total
    small = Graph(
        **{name: getattr(graph, name)[points] for name in ("time", "event", "role", "rank")},
        first=contraction.first,
        source=contraction.source,
        min_latency=lag,
        kind=graph.kind[last],
        owner=graph.owner[last],
        dropped=graph.dropped,
    )
    contracted = scenario.replace(
        graph=small,
        lag=lag,
        start=scenario.start[points],
        basis=scenario.basis[last],
        communications=_renumber(scenario.communications, contraction),
    )
    return ChainScenario(contracted, scenario, contraction, renumber_extremes(extremes, contraction))


def _mark_changes_of_basis(graph: Graph, basis: UInt8Array, anchors: NDArray[np.bool_]) -> None:
    """Mark in ``anchors`` the points at which an outgoing edge has another `Basis` than the incoming edge."""
    if basis.size and (basis == basis[0]).all():
        return
    before = basis[np.minimum(graph.first[:-1], basis.size - 1)]
    anchors[graph.source[basis != before[graph.source]]] = True


def _renumber(communications: Communications, contraction: ContractedGraph) -> Communications:
    """Return the communications with point and edge numbers replaced by those of the contracted graph."""

    def find_chains(edges: Int64Array) -> Int64Array:
        return np.where(edges >= 0, contraction.chain[edges], -1).astype(np.int64)

    parts = communications.participations
    columns = [pl.Series(name, contraction.find_positions(parts[name].to_numpy())) for name in _POINTS]
    columns += [pl.Series(name, find_chains(parts[name].to_numpy())) for name in _EDGES]
    return Communications(communications.instances, parts.with_columns(columns))
