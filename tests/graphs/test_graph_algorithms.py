"""Graph: order, schedule, path, slack and reach against slow references on random graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom import _native
from etloom.graphs import algorithms
from etloom.graphs.graph import EdgeKind, Graph, PointRole, assemble_graph
from support.examples import examples


def build(times: list[int], edges: list[tuple[int, int, int]]) -> Graph:
    """A graph of points and of edges (source, target, min_latency); the event of a point is its place."""
    n, columns = len(times), np.array(edges, np.int64).reshape(-1, 3).T
    return Graph.from_edges(
        time=np.array(times, np.int64),
        event=np.arange(n, dtype=np.int32),
        role=np.zeros(n, np.uint8),
        rank=np.zeros(n, np.int32),
        source=columns[0].astype(np.int32),
        target=columns[1].astype(np.int32),
        min_latency=columns[2].copy(),
        kind=np.zeros(len(edges), np.uint8),
        owner=np.arange(len(edges), dtype=np.int32),
    )


@st.composite
def drafts(draw: st.DrawFn, acyclic: bool = True) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Points of few distinct times in any order, so that ties abound, and edges between any of them."""
    n = draw(st.integers(1, 12))
    times = draw(st.lists(st.integers(-4, 4), min_size=n, max_size=n))
    pairs = draw(
        st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), st.integers(0, 5)), max_size=25)
    )
    if acyclic:
        hidden = draw(st.permutations(range(n)))
        rank = sorted(range(n), key=lambda v: (times[v], hidden[v]))
        place = {v: i for i, v in enumerate(rank)}
        pairs = [(u, v, lag) for u, v, lag in pairs if place[u] < place[v]]
    return times, pairs


def in_edges(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    lag = graph.lag
    return {
        v: [(int(graph.source[e]), int(lag[e])) for e in range(graph.first[v], graph.first[v + 1])]
        for v in range(len(graph))
    }


def slow_schedule(graph: Graph, lag: np.ndarray) -> list[int]:
    time = graph.time.tolist()
    for v in range(len(graph)):
        into = [time[graph.source[e]] + int(lag[e]) for e in range(graph.first[v], graph.first[v + 1])]
        time[v] = max(into, default=time[v])
    return time


@given(drafts())
def test_every_edge_of_an_acyclic_draft_is_kept_and_goes_forward(draft):
    times, edges = draft
    graph = build(times, edges)
    assert graph.dropped.sum() == 0
    assert (graph.source < graph.target).all()
    assert (np.diff(graph.time) >= 0).all()
    assert sorted(graph.event) == list(range(len(times)))
    assert [times[p] for p in graph.event] == graph.time.tolist()
    pairs = [
        (int(graph.event[u]), int(graph.event[v])) for u, v in zip(graph.source, graph.target, strict=True)
    ]
    assert sorted(pairs) == sorted((u, v) for u, v, _ in edges)
    assert pairs == [edges[e][:2] for e in graph.owner]


def slow_order(times: list[int], edges: list[tuple[int, int, int]]) -> list[int]:
    """Places by time; of equal times those that wait for none, then those that waited for these, the lowest first,
    which also goes on where all wait for each other."""
    found = []
    for now in sorted(set(times)):
        tied = [v for v in range(len(times)) if times[v] == now]
        inner = [(u, v) for u, v, _ in edges if u != v and times[u] == now == times[v]]
        waiting = {v: sum(target == v for _, target in inner) for v in tied}
        ready = [v for v in tied if not waiting[v]]
        for at in range(len(tied)):
            if at == len(ready):
                ready.append(next(v for v in tied if v not in ready))
            for target in [v for u, v in inner if u == ready[at]]:
                waiting[target] -= 1
                if not waiting[target] and target not in ready:
                    ready.append(target)
        found += ready
    return found


@given(st.data())
def test_points_and_edges_in_parts_are_ordered_as_in_one(data):
    """Points that ascend for a while, as threads do, or hardly do; in parts of any length."""
    runs = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=12).map(sorted), min_size=1, max_size=40))
    times = [time for run in runs for time in run]
    if not times:
        return
    place = st.integers(0, len(times) - 1)
    edges = data.draw(st.lists(st.tuples(place, place, st.integers(0, 5)), max_size=40))
    graph = build(times, edges)
    assert graph.event.tolist() == slow_order(times, edges)

    def cut(values: list, dtype: type) -> list[np.ndarray]:
        cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=4).map(sorted))
        return np.split(np.array(values, dtype), cuts)

    n, m = len(times), len(edges)
    bounds = data.draw(st.lists(st.integers(0, m), max_size=4).map(sorted))
    source, target, min_latency = np.array(edges, np.int64).reshape(-1, 3).T
    columns = {
        "source": (source, np.int32),
        "target": (target, np.int32),
        "min_latency": (min_latency, np.int64),
    }
    columns |= {"kind": (np.zeros(m), np.uint8), "owner": (np.arange(m), np.int32)}
    parts = assemble_graph(
        {
            "time": cut(times, np.int64),
            "event": cut(list(range(n)), np.int32),
            "role": cut([0] * n, np.uint8),
            "rank": [np.broadcast_to(np.int32(3), n)],
        },
        {name: np.split(values.astype(dtype), bounds) for name, (values, dtype) in columns.items()},
        [False] * (len(bounds) + 1),
    )
    for name in (
        "time",
        "event",
        "role",
        "first",
        "source",
        "min_latency",
        "unexplained",
        "kind",
        "owner",
        "dropped",
    ):
        assert getattr(parts, name).tolist() == getattr(graph, name).tolist(), name
    assert parts.rank.tolist() == [3] * n


@given(drafts(acyclic=False))
def test_unexplained_delay_and_residual_exceed_minimum_latencies(draft):
    graph = build(*draft)
    for v in range(len(graph)):
        into = range(graph.first[v], graph.first[v + 1])
        beyond = [int(graph.time[v] - graph.time[graph.source[e]] - graph.min_latency[e]) for e in into]
        assert graph.residual[v] == min(beyond, default=0)
        assert [int(graph.unexplained[e]) for e in into] == [
            min(beyond) if one == min(beyond) else 0 for one in beyond
        ]


@given(drafts(acyclic=False))
def test_backward_edges_are_dropped_and_counted(draft):
    times, edges = draft
    graph = build(times, edges)
    assert (graph.source < graph.target).all()
    assert graph.dropped.sum() + len(graph.source) == len(edges)
    kept = set(graph.owner.tolist())
    for e, (u, v, _) in enumerate(edges):
        if times[u] > times[v] or u == v:
            assert e not in kept
        if times[u] < times[v]:
            assert e in kept


def test_edges_along_the_numbers_survive_a_circle():
    graph = build([5, 5, 5], [(0, 1, 0), (1, 2, 0), (2, 0, 0)])
    assert graph.owner.tolist() == [0, 1] and graph.dropped[EdgeKind.SEGMENT] == 1


@given(drafts(acyclic=False))
def test_with_unexplained_delays_every_graph_gives_the_recorded_times(draft):
    graph = build(*draft)
    assert algorithms.compute_times(graph).tolist() == graph.time.tolist()
    assert (graph.unexplained >= 0).all() and (graph.min_latency >= 0).all()
    took = np.repeat(graph.time, np.diff(graph.first)) - graph.time[graph.source]
    assert (graph.lag <= took).all()
    for v, into in in_edges(graph).items():
        assert not into or max(graph.time[u] + lag for u, lag in into) == graph.time[v]


@given(drafts(), st.lists(st.integers(-3, 9), min_size=30, max_size=30))
def test_schedule_with_other_lags_is_the_slow_one(draft, lags):
    graph = build(*draft)
    lag = np.array(lags[: len(graph.source)], np.int64)
    assert algorithms.compute_times(graph, lag).tolist() == slow_schedule(graph, lag)


def test_start_gives_the_times_of_sources():
    graph = build([0, 1, 9], [(0, 2, 2), (1, 2, 3)])
    lag = graph.min_latency
    assert algorithms.compute_times(graph, lag).tolist() == [0, 1, 4]
    assert algorithms.compute_times(graph, lag, np.array([0, 7, -1], np.int64)).tolist() == [0, 7, 10]
    with pytest.raises(ValueError, match="do not fit"):
        algorithms.compute_times(graph, lag[:1])


@given(drafts(), st.data())
def test_no_lag_raised_moves_no_point_later_and_saves_no_more_than_was_taken(draft, data):
    graph = build(*draft)
    lag = graph.lag
    cut = np.array([data.draw(st.integers(0, int(one))) for one in lag], np.int64)
    time = algorithms.compute_times(graph, lag - cut)
    assert (time <= graph.time).all()
    assert graph.time.max() - time.max() <= cut.sum()


@given(drafts())
def test_longest_path_is_connected_and_sums_to_the_end(draft):
    graph = build(*draft)
    path = algorithms.find_longest_path(graph)
    end = int(np.argmax(graph.time))
    target, lag = graph.target, graph.lag
    at = int(graph.source[path[0]]) if path.size else end
    begun = graph.time[at]
    assert at in graph.sources
    for e in path:
        assert graph.source[e] == at
        at = int(target[e])
    assert at == end and begun + lag[path].sum() == graph.time[end]


@given(drafts())
def test_slack_is_how_far_a_point_can_be_delayed(draft):
    graph = build(*draft)
    slack = algorithms.compute_slack(graph)
    last = graph.time.max()
    for v in range(len(graph)):
        for delay, grows in ((int(slack[v]), False), (int(slack[v]) + 1, True)):
            time = graph.time.tolist()
            time[v] += delay
            for w in range(v + 1, len(graph)):
                time[w] = max([time[w], *(time[u] + lag for u, lag in in_edges(graph)[w])])
            assert (max(time) > last) == grows


@given(drafts(acyclic=False))
def test_slack_and_path_of_a_recording_are_those_with_its_lags(draft):
    graph = build(*draft)
    assert algorithms.compute_slack(graph).tolist() == algorithms.compute_slack(graph, lag=graph.lag).tolist()
    assert (
        algorithms.find_longest_path(graph).tolist()
        == algorithms.find_longest_path(graph, lag=graph.lag).tolist()
    )


def test_slack_towards_chosen_ends():
    graph = build([0, 2, 3, 10], [(0, 1, 2), (0, 2, 3), (0, 3, 10)])
    assert algorithms.compute_slack(graph).tolist() == [0, 8, 7, 0]
    assert algorithms.compute_slack(graph, ends=[1])[:2].tolist() == [0, 0]


@given(drafts(), st.data())
def test_reach_is_the_transitive_closure(draft, data):
    graph = build(*draft)
    begin = data.draw(st.integers(0, len(graph) - 1))
    pairs = set(zip(graph.source.tolist(), graph.target.tolist(), strict=True))
    for backward in (False, True):
        found, grown = {begin}, True
        while grown:
            more = {(u if backward else v) for u, v in pairs if (v if backward else u) in found}
            grown = not more <= found
            found |= more
        reached = algorithms.mark_reachable(graph, [begin], backward=backward)
        assert set(np.flatnonzero(reached).tolist()) == found


def test_an_edge_to_nowhere_is_refused():
    with pytest.raises(ValueError, match="not there"):
        build([0, 1], [(0, 2, 1)])


def test_roles_and_kinds_fit_a_byte_and_name_themselves():
    assert max(PointRole) < 256 and max(EdgeKind) < 256
    assert EdgeKind.STREAM_WAIT.label == "stream wait"


def test_an_empty_graph():
    graph = build([], [])
    assert algorithms.compute_makespan(graph) == 0 and algorithms.find_longest_path(graph).size == 0
    assert algorithms.compute_times(graph).size == 0 and algorithms.compute_slack(graph).size == 0


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32 - 1))
def test_large_times_sort_and_schedule(seed):
    random = np.random.default_rng(seed)
    n, m = 3000, 6000
    time = random.integers(-(2**62), 2**62, n)
    a, b = random.integers(0, n, (2, m))
    ahead = time[a] < time[b]
    edges = [(int(u), int(v), 0) for u, v in zip(np.where(ahead, a, b), np.where(ahead, b, a), strict=True)]
    graph = build(time.tolist(), edges)
    assert (graph.time == np.sort(time)).all()
    assert algorithms.compute_times(graph).tolist() == graph.time.tolist()


@pytest.mark.parametrize("first", [[0, 0, 2**31 - 1, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0]])
def test_places_of_edges_that_are_not_there_are_refused(first: list[int]) -> None:
    none, ticks = np.zeros(0, np.int32), np.zeros(0, np.int64)
    with pytest.raises(ValueError, match="the edges do not fit the points"):
        algorithms._native.residual(np.array(first, np.int32), none, np.zeros(3, np.int64), ticks)


@pytest.mark.parametrize("names_no_point", [False, True])
def test_two_threads_order_many_edges_by_target(names_no_point: bool) -> None:
    """Two threads share the edges from 2^18 on; in each point they are in the order in which they were added."""
    draw, points, count = np.random.default_rng(7), 50_000, 300_000
    times = draw.permutation(points).astype(np.int64)
    source, target = draw.integers(0, points, (2, count)).astype(np.int32)
    columns = {
        "source": source,
        "target": target,
        "min_latency": draw.integers(-5, 50, count),
        "kind": draw.integers(0, 15, count).astype(np.uint8),
        "owner": np.arange(count, dtype=np.int32),
    }
    number = _native.number_points([times], [source], [target], [columns["kind"]], [False])
    assert number.tolist() == times.tolist(), "the times are 0, 1, ..., so they are the numbers"
    if names_no_point:
        target[count // 2] = points
        with pytest.raises(ValueError, match="an edge names a point that is not there"):
            _native.order_edges(number, np.sort(times), *([values] for values in columns.values()), [False])
        with pytest.raises(ValueError, match="an edge names a point that is not there"):
            _native.number_points([times], [source], [target], [columns["kind"]], [False])
        return
    first, from_, floor, kind, owner, dropped = _native.order_edges(
        number, np.sort(times), *([values] for values in columns.values()), [False]
    )
    u, v = times[source], times[target]
    kept = np.flatnonzero(u < v)
    kept = kept[np.argsort(v[kept], kind="stable")]
    assert owner.tolist() == kept.tolist()
    assert from_.tolist() == u[kept].tolist() and kind.tolist() == columns["kind"][kept].tolist()
    assert floor.tolist() == np.clip(columns["min_latency"][kept], 0, (v - u)[kept]).tolist()
    assert np.diff(first).tolist() == np.bincount(v[kept], minlength=points).tolist()
    assert sorted(dropped) == sorted(columns["kind"][u >= v])
