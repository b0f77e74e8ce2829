"""What of a recording a graph explains, against obvious Python on random graphs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom.graphs import quality
from etloom.graphs.graph import EdgeKind, Graph
from support.examples import examples

# Work, and what leads to it, more often than the rest.
KINDS = [
    EdgeKind.KERNEL,
    EdgeKind.KERNEL,
    EdgeKind.LAUNCH,
    EdgeKind.LAUNCH,
    EdgeKind.STREAM,
    EdgeKind.OVERLAP,
    EdgeKind.SEGMENT,
]
US = st.integers(0, 40).map(lambda us: us * 1000)


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Graph, SimpleNamespace]:
    """A graph of two ranks, any edge of any kind, and the events of one; of a few the duration is not known, and ids
    are their rows or not."""
    n = draw(st.integers(2, 7))
    gap = draw(st.sampled_from([1, 3]))
    times = draw(st.lists(US, min_size=n, max_size=n))
    place = st.integers(0, n - 1)
    edges = draw(st.lists(st.tuples(place, place, US, st.sampled_from(KINDS)), min_size=1, max_size=25))
    source, target, min_latency, kind = (np.array(column) for column in zip(*edges, strict=True))
    rank = np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), np.int32)
    # No rank launches work of another.
    kind[(kind == EdgeKind.LAUNCH) & (rank[source] != rank[target])] = EdgeKind.STREAM
    graph = Graph.from_edges(
        time=np.array(times, np.int64),
        event=gap * np.arange(n, dtype=np.int32),
        role=np.zeros(n, np.uint8),
        rank=rank,
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        min_latency=min_latency.astype(np.int64),
        kind=kind.astype(np.uint8),
        owner=np.full(len(edges), -1, np.int32),
    )
    durations = draw(st.lists(st.one_of(st.none(), US), min_size=n, max_size=n))
    events = {"id": range(0, gap * n, gap), "ts": [time - 2000 for time in times], "dur": durations}
    schema = {"id": pl.UInt32, "ts": pl.Int64, "dur": pl.Int64}
    return graph, SimpleNamespace(events=pl.DataFrame(events, schema=schema))


def slow_reasons(graph: Graph, trace: SimpleNamespace, v: int, shift: int) -> set[str]:
    """What explains the start of work v if it began so much later."""
    at, found = int(graph.time[v]) + shift, set()
    for e in range(graph.first[v], graph.first[v + 1]):
        low = int(graph.time[graph.source[e]])
        high = low + quality.SOON_NS
        if graph.kind[e] == EdgeKind.OVERLAP:
            high = int(graph.time[v])
        elif graph.kind[e] == EdgeKind.LAUNCH:
            call = trace.events.row(
                by_predicate=pl.col("id") == int(graph.event[graph.source[e]]), named=True
            )
            low, high = call["ts"], call["ts"] + (call["dur"] or 0) + quality.SOON_NS
        if low <= at <= high:
            found.add("launch" if graph.kind[e] == EdgeKind.LAUNCH else "order")
    return found


@settings(max_examples=examples(200))
@given(recordings(), st.integers(0, 1))
def test_the_starts_that_are_explained(recording, rank):
    graph, trace = recording
    work = {int(graph.source[e]) for e in np.flatnonzero(graph.kind == EdgeKind.KERNEL)}
    work = {v for v in work if graph.rank[v] == rank}
    reasons = [slow_reasons(graph, trace, v, 0) for v in work]
    found = quality.measure_explained_starts(graph, trace, rank)
    assert found.starts == len(work)
    assert found.residual == graph.residual[graph.rank == rank].sum()
    if work:
        assert found.share == sum(map(bool, reasons)) / len(work)
        assert found.ambiguous == sum(len(one) == 2 for one in reasons) / len(work)
        assert found.by_chance == tuple(
            sum(bool(slow_reasons(graph, trace, v, shift)) for v in work) / len(work)
            for shift in quality.SHIFTS_NS
        )
    assert quality.measure_explained_starts(graph, trace, rank, shifts=()).by_chance == ()


@given(recordings())
def test_the_sum_of_unexplained_delays(recording):
    graph, _ = recording
    assert quality.sum_residuals(graph) == graph.residual.sum()
    fits = quality.measure_fit_by_rank(graph, [0, 1, 9])
    assert fits[None].residual == graph.residual.sum()
    for rank in (0, 1, 9):
        own = graph.rank == rank
        assert fits[rank].points == own.sum()
        assert fits[rank].residual == graph.residual[own].sum()
        assert fits[rank].edges == np.diff(graph.first)[own].sum()


@settings(max_examples=examples(100))
@given(recordings())
def test_a_part_of_the_graph_suffices_to_measure_a_rank(recording):
    graph, trace = recording
    is_between_ranks = graph.rank[graph.source] != graph.rank[graph.target]  # where no kernel runs
    kind = np.where(is_between_ranks & (graph.kind == EdgeKind.KERNEL), EdgeKind.STREAM, graph.kind)
    graph = dataclasses.replace(graph, kind=kind.astype(np.uint8))
    parts = dict(graph.split_by_rank([0, 1, 7]))
    assert len(parts[7]) == 0
    for rank in (0, 1):
        expected = quality.measure_explained_starts(graph, trace, rank)
        assert quality.measure_explained_starts(parts[rank], trace, rank) == expected
        assert len(parts[rank].source) == np.isin(graph.rank[graph.target], [rank]).sum()
