"""A part of the dependency graph, small enough to be drawn: nodes and edges with names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core.errors import AnalysisError, EtloomError
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.graphs.algorithms import EdgeKind, Graph
from etloom.linker import link

LIMIT = 2000
"""Nodes; programs that lay graphs out take minutes beyond."""


@dataclass(frozen=True, eq=False)
class Part:
    """``nodes``: number, rank, event (id), name, category, tid, stream, step, start_ns, duration_ns. ``edges``: source
    and target (numbers), why, floor_ns, excess_ns."""

    nodes: pl.DataFrame
    edges: pl.DataFrame


def part(
    what: Trace | Job, step: int | None, rank: int | None, around: str | None, depth: int, limit: int
) -> Part:
    """The events of a step, of a rank, or within ``depth`` edges of events of the name ``around``, and what leads
    from one to another.

    A node is an event; its start and end and what lies between are one. Raises AnalysisError where nothing is left,
    EtloomError for more than ``limit`` nodes.
    """
    ranks = dict(what) if isinstance(what, Job) else {what.rank or 0: what}
    if rank is not None and rank not in ranks:
        raise unknown_rank_error(rank, ranks)
    linked = {number: one if one.meta.get("linked") else link(one) for number, one in ranks.items()}
    graph = build_graph(Job(linked) if len(linked) > 1 else next(iter(linked.values()))).graph
    nodes = pl.concat([_events(one, number) for number, one in linked.items()]).with_row_index("number")
    edges = _edges(graph, nodes)
    chosen = np.ones(nodes.height, bool)
    if rank is not None:
        chosen &= (nodes["rank"] == rank).to_numpy()
    if step is not None:
        chosen &= (nodes["step"] == step).fill_null(False).to_numpy()
    if around is not None:
        chosen &= _near((nodes["name"] == around).to_numpy() & chosen, edges, depth)
    used = np.zeros(nodes.height, bool)
    used[edges["source"]] = used[edges["target"]] = True
    chosen &= used
    count = int(chosen.sum())
    if not count:
        raise AnalysisError(
            "no event of that part is in the graph", remedy="etloom info says what steps and ranks are"
        )
    if count > limit:
        raise EtloomError(
            f"the part has {count:,} nodes, more than can be drawn",
            remedy=f"choose with the options step, rank, or around and depth (etloom export -O step=3), "
            f"or set limit to {count}",
        )
    kept = edges.filter(chosen[edges["source"]] & chosen[edges["target"]])
    return Part(nodes.filter(chosen), kept)


def _events(trace: Trace, rank: int) -> pl.DataFrame:
    return trace.events.select(
        rank=pl.lit(rank, pl.Int64),
        event=pl.col("id").cast(pl.Int64),
        name=pl.col("name").cast(pl.String).fill_null(""),
        category=pl.col("cat").cast(pl.String).fill_null(""),
        tid="tid",
        stream="stream",
        step="step",
        start_ns=pl.col("ts"),
        duration_ns=pl.col("dur").fill_null(0),
    )


def _edges(graph: Graph, nodes: pl.DataFrame) -> pl.DataFrame:
    """The edges between different events. Arrivals, which are of no event, lead from each that arrives on."""
    target = graph.target
    keys = nodes.select("rank", "event", "number")
    points = pl.DataFrame(
        {"rank": graph.rank, "event": graph.event}, schema={"rank": pl.Int64, "event": pl.Int64}
    )
    number = points.join(keys, on=["rank", "event"], how="left", maintain_order="left")["number"]
    of = number.fill_null(-1).cast(pl.Int64).to_numpy()
    source, into, kind = graph.source, target, graph.kind
    floor, excess = graph.floor, graph.excess
    arrivals = np.flatnonzero(kind == EdgeKind.ARRIVAL)
    if arrivals.size:
        # arrival -> transfer becomes one edge from each that arrives to each that goes on.
        gone = np.flatnonzero(np.isin(kind, (EdgeKind.TRANSFER, EdgeKind.MESSAGE)))
        pairs = pl.DataFrame({"at": target[arrivals], "source": source[arrivals]}).join(
            pl.DataFrame({"at": source[gone], "target": target[gone], "edge": gone}), on="at"
        )
        edge = pairs["edge"].to_numpy()
        source = np.append(source, pairs["source"].to_numpy()).astype(np.int32)
        into = np.append(target, pairs["target"].to_numpy()).astype(np.int32)
        kind = np.append(kind, kind[edge])
        floor, excess = np.append(floor, floor[edge]), np.append(excess, excess[edge])
    between = (of[source] >= 0) & (of[into] >= 0) & (of[source] != of[into])
    frame = pl.DataFrame(
        {
            "source": of[source][between],
            "target": of[into][between],
            "why": pl.Series([one.label for one in EdgeKind]).gather(kind[between].astype(np.int64)),
            "floor_ns": floor[between],
            "excess_ns": excess[between],
        }
    )
    return frame.unique(["source", "target", "why"], keep="first", maintain_order=True)


def _near(begin: np.ndarray, edges: pl.DataFrame, depth: int) -> np.ndarray:
    """What is at most ``depth`` edges away, either way."""
    source, target = edges["source"].to_numpy(), edges["target"].to_numpy()
    reached = begin.copy()
    for _ in range(depth):
        forward, back = target[reached[source]], source[reached[target]]
        reached[forward] = reached[back] = True
    return reached


def text(value: object) -> str:
    """For an attribute: no control characters, which XML has no way to write."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))
