"""Contracted graphs: times, paths and extremes equal those of the whole graph, for any lags."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etloom import _native
from etloom.graphs import algorithms
from etloom.graphs.algorithms import REMOVED_LAG
from etloom.graphs.contraction import (
    ChainLags,
    ContractedGraph,
    GroupedEdges,
    contract_graph,
    mark_extremes,
)
from etloom.graphs.graph import EdgeKind, Graph, Int32Array, Int64Array


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Points in few threads, with some edges between them, and few distinct times: ties abound."""
    n = draw(st.integers(1, 24))
    threads = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    times = sorted(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)))
    edges = []
    for thread in range(3):
        on_thread = [v for v in range(n) if threads[v] == thread]
        edges += list(itertools.pairwise(on_thread))
    place = st.integers(0, n - 1)
    extra = draw(st.lists(st.tuples(place, place), max_size=8))
    edges += [(min(pair), max(pair)) for pair in extra if pair[0] != pair[1]]
    kinds = draw(st.lists(st.sampled_from(EdgeKind), min_size=len(edges), max_size=len(edges)))
    latency = draw(st.lists(st.integers(0, 4), min_size=len(edges), max_size=len(edges)))
    source, target = np.array(edges, np.int32).reshape(-1, 2).T
    return Graph.from_edges(
        time=np.array(times, np.int64),
        event=np.arange(n, dtype=np.int32),
        role=np.zeros(n, np.uint8),
        rank=np.array(threads, np.int32),
        source=source.copy(),
        target=target.copy(),
        min_latency=np.array(latency, np.int64),
        kind=np.array(kinds, np.uint8),
        owner=np.arange(len(edges), dtype=np.int32),
    )


def draw_lags(data: st.DataObject, graph: Graph) -> Int64Array:
    """Draw lags that changes may lead to: none is negative, but synchronization may be removed."""
    count = len(graph.source)
    lags = np.array(data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)), np.int64)
    removed = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    lags[removed & (graph.kind == EdgeKind.SYNC)] = REMOVED_LAG
    return lags


def contract(data: st.DataObject, graph: Graph) -> ContractedGraph:
    """Contract a graph with the extremes of the whole and with some other points."""
    anchors = mark_extremes(graph, np.zeros(len(graph), np.int32))[0] > 0
    anchors[data.draw(st.lists(st.integers(0, len(graph) - 1)))] = True
    return contract_graph(graph, anchors)


def set_lags(contraction: ContractedGraph, lag: Int64Array) -> ChainLags:
    """Return the lags of chains after a change of all edges that differ."""
    recorded = contraction.graph.lag
    edges = np.flatnonzero(recorded != lag).astype(np.int32)
    lags = contraction.recorded.copy(for_paths=True)
    contraction.change(lags, edges, lag[edges] - recorded[edges], lag[edges])
    return lags


@pytest.mark.slow
@given(graphs(), st.data())
def test_times_and_paths_equal_those_of_the_complete_graph(graph: Graph, data: Any) -> None:
    contraction, lag = contract(data, graph), draw_lags(data, graph)
    start = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(graph), max_size=len(graph))))
    expected = algorithms.compute_times(graph, lag, start)
    lags = set_lags(contraction, lag)
    times = contraction.compute_times(lags, start[contraction.points])
    assert times.tolist() == expected[contraction.points].tolist()

    def read(edges: Int32Array) -> Int64Array:
        return lag[edges]

    end = contraction.find_last_point(times, lags, read)
    assert end == np.argmax(expected)
    for point in range(len(graph)):
        path = contraction.find_longest_path(point, times, lags)
        assert path.tolist() == algorithms.find_longest_path(graph, point, expected, lag).tolist()


@pytest.mark.slow
@given(graphs(), st.data())
def test_every_edge_is_in_the_chain_between_two_kept_points(graph: Graph, data: Any) -> None:
    contraction = contract(data, graph)
    degrees = np.diff(graph.first), np.bincount(graph.source, minlength=len(graph))
    kept = set(contraction.points.tolist())
    assert {v for v in range(len(graph)) if degrees[0][v] != 1 or degrees[1][v] != 1} <= kept
    for chain in range(len(contraction.last)):
        edges = np.flatnonzero(contraction.chain == chain)
        assert graph.source[edges[1:]].tolist() == graph.target[edges[:-1]].tolist()
        assert graph.source[edges[0]] == contraction.points[contraction.source[chain]]
        assert edges[-1] == contraction.last[chain]
        assert graph.target[edges[-1]] in kept
        assert not kept & set(graph.target[edges[:-1]].tolist())
        assert contraction.recorded.total[chain] == graph.lag[edges].sum()
        assert contraction.recorded.last[chain] == graph.lag[edges[-1]]


@pytest.mark.slow
@given(graphs(), st.data())
def test_grouped_edges_are_scaled_like_single_ones(graph: Graph, data: Any) -> None:
    contraction, m = contract(data, graph), len(graph.source)
    latency = data.draw(st.lists(st.sampled_from([0, 1, 3, 2**31 - 1, 2**31]), min_size=m, max_size=m))
    graph.min_latency[:] = latency  # the delays are computed below
    rows = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=m, max_size=m)), np.int32)
    is_edge = np.array(data.draw(st.lists(st.booleans(), min_size=m, max_size=m)), bool)
    marked = data.draw(st.none() | st.lists(st.booleans(), min_size=4, max_size=4).map(np.array))
    times = data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.5, 1e6]))
    edges = np.flatnonzero(is_edge).astype(np.int32)
    groups = GroupedEdges.group(contraction, edges, rows)
    upper, lower = contraction.recorded.copy(for_paths=True), contraction.recorded.copy(for_paths=False)
    longer = groups.scale(times, marked, upper, lower)

    expected, total = contraction.recorded.copy(for_paths=True), 0
    for edge in edges:
        floor = int(graph.min_latency[edge])
        if graph.unexplained[edge] or floor >= 2**31:
            assert edge in groups.others
            continue
        assert edge not in groups.others
        if marked is None or (rows[edge] >= 0 and marked[rows[edge]]):
            chain, more = contraction.chain[edge], round(floor * times) - floor
            expected.total[chain] += more
            total += more
            if contraction.last[chain] == edge:
                expected.last_edges[chain] = floor + more
    assert np.array_equal(upper.total, expected.total)
    assert np.array_equal(lower.total, expected.total)
    assert np.array_equal(upper.last_edges, expected.last_edges)
    assert longer == total


def test_grouped_edges_that_do_not_fit_are_refused() -> None:
    one, lags = np.zeros(1, np.int32), np.zeros(1, np.int64)
    groups = [one, np.array([0, 1], np.int32), np.ones(1, np.uint8), one, one, None]
    with pytest.raises(ValueError, match="the factor is too large"):
        _native.scale_groups(*groups, 2.0**20, lags, lags, lags)
    for part, wrong in (
        (0, one + 1),
        (1, one),
        (1, np.array([1, 0], np.int32)),
        (1, np.array([0, 2], np.int32)),
    ):
        parts = groups.copy()
        parts[part] = wrong
        with pytest.raises(ValueError, match=r"do not fit the chains|there is no such chain"):
            _native.scale_groups(*parts, 2.0, lags, lags, lags)
    for edge, chain in ((1, 0), (-1, 0), (0, 1)):
        with pytest.raises(ValueError, match="there is no such edge"):
            _native.group_edges(one + chain, one, one + edge, lags, lags, one)


@given(graphs(), st.data())
def test_the_extremes_are_the_first_and_the_last_of_each_group(graph: Graph, data: Any) -> None:
    groups = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=len(graph), max_size=len(graph))))
    (marks,) = mark_extremes(graph, groups.astype(np.int32))
    time = algorithms.compute_times(graph, draw_lags(data, graph), np.zeros(len(graph), np.int64))
    assert not marks[groups < 0].any()
    for group in set(groups.tolist()) - {-1}:
        members = time[groups == group]
        assert time[(groups == group) & (marks & 1 > 0)].min() == members.min()
        assert time[(groups == group) & (marks & 2 > 0)].max() == members.max()


def test_a_chain_that_is_not_there_is_refused() -> None:
    first, source = np.array([0, 0, 1], np.int32), np.zeros(1, np.int32)
    none, one = np.zeros(0, np.int32), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="there is no such edge"):
        _native.change_chains(source, source, np.array([1], np.int32), one, one, one.copy(), None)
    with pytest.raises(ValueError, match="there is no such chain"):
        _native.expand_chains(first, source, none, none, none, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="there is no such row"):
        _native.select_edges(source, np.array([3], np.int32), np.ones(2, bool))
    with pytest.raises(ValueError, match="do not fit"):
        _native.contract(first, source, np.ones(3, bool))
