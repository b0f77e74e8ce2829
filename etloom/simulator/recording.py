"""Converts a recorded job to the scenario from which predictions start, and finds its communications."""

from __future__ import annotations

import json

import numpy as np
import polars as pl

from etloom.collectives import list_participations
from etloom.core.trace import Job
from etloom.graphs import DependencyGraph, build_graph, check_timed
from etloom.graphs.graph import EdgeKind, Graph, Int64Array, PointRole
from etloom.simulator.scenario import (
    INSTANCE_COLUMNS,
    PARTICIPATION_COLUMNS,
    Basis,
    Communications,
    Scenario,
)

_DURATION_KINDS = (EdgeKind.KERNEL, EdgeKind.COMPLETE)
_TRANSFER_KINDS = (EdgeKind.TRANSFER, EdgeKind.MESSAGE)


def describe_recording(job: Job, dependencies: DependencyGraph | None = None) -> Scenario:
    """Return the recorded job as a scenario, whose times are the recorded ones.

    Args:
        job: linked traces.
        dependencies: the graph of the job, if already built.

    Raises:
        LinkError: a trace is not linked.
        AnalysisError: the job has no timed event.
    """
    dependencies = dependencies or build_graph(job)
    check_timed(dependencies, job)
    graph = dependencies.graph
    return Scenario(
        recorded=job,
        graph=graph,
        lag=graph.lag,
        start=recorded_starts(graph),
        basis=np.full(len(graph.source), Basis.RECORDED, np.uint8),
        communications=find_communications(job, graph),
        template={rank: rank for rank in job},
    )


def recorded_starts(graph: Graph) -> Int64Array:
    """Return the earliest start of each point, ns: for points without incoming edges the recorded time, else the run's
    first time."""
    start = np.full(len(graph), graph.time.min() if len(graph) else 0, np.int64)
    start[graph.sources] = graph.time[graph.sources]
    return start


def find_communications(job: Job, graph: Graph) -> Communications:
    """Find a job's communications in its graph, matched across ranks; each unmatched communication is an instance."""
    facts = pl.concat([_describe_participations(job, rank) for rank in job])
    table = facts.join(_find_own_edges(graph), on=("rank", "event")).join(
        _find_transfers(graph), on=("rank", "event"), how="left", maintain_order="left"
    )
    unmatched = pl.int_range(pl.len()) + len(graph)  # arrival points have smaller numbers
    table = table.with_columns(instance=pl.coalesce("arrival", unmatched).cast(pl.Int64))
    instances = table.group_by("instance", maintain_order=True).agg(
        pl.col("collective").drop_nulls().first(),
        pl.col("bytes").max(),
        pl.col("group_size").max(),
        ranks=pl.when(pl.col("members").list.len().max() > 0)
        .then(pl.col("members").drop_nulls().first())
        .otherwise(pl.col("rank").unique().sort().implode()),
        group=pl.col("pg_name").drop_nulls().first(),
        where=pl.col("where").first(),
    )
    return Communications(
        instances.select(pl.col(name).cast(dtype) for name, dtype in INSTANCE_COLUMNS.items()),
        table.with_columns(pl.col("transfer_edge").fill_null(-1)).select(
            pl.col(name).cast(dtype) for name, dtype in PARTICIPATION_COLUMNS.items()
        ),
    )


def _describe_participations(job: Job, rank: int) -> pl.DataFrame:
    """Return a table of the communications in which a rank takes part, with the members of their process groups."""
    trace = job[rank]
    table = trace.compute_once(list_participations, rank)
    world = trace.meta.get("world_size")
    # A communication that names no process group belongs to the default one, which is all ranks.
    world_size = pl.when(pl.col("pg_name").is_null()).then(
        pl.lit(world if isinstance(world, int) else None, pl.Int64)
    )
    members = [
        [source, destination] if None not in (source, destination) else _parse_ranks(ranks)
        for source, destination, ranks in table.select("source", "destination", "ranks").iter_rows()
    ]
    return table.select(
        pl.col("rank").cast(pl.Int64),
        pl.col("event").cast(pl.Int64),
        pl.col("collective", "pg_name", "where", "bytes"),
        group_size=pl.coalesce(
            pl.when(pl.col("collective") == "message").then(2),
            "group_size",
            pl.col("group_size").max().over("pg_name"),
            world_size,
        ),
        members=pl.Series(members, dtype=pl.List(pl.Int64)),
    )


def _parse_ranks(text: str | None) -> list[int] | None:
    try:
        ranks = json.loads(text) if text else None
    except ValueError:
        return None
    return ranks if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks) else None


def _find_own_edges(graph: Graph) -> pl.DataFrame:
    """Return a table of the edge from begin to finish of each kernel and asynchronous range, with both points."""
    target = graph.target
    edges = np.flatnonzero(np.isin(graph.kind, _DURATION_KINDS) & (graph.role[target] == PointRole.END))
    return pl.DataFrame(
        {
            "rank": graph.rank[target[edges]].astype(np.int64),
            "event": graph.owner[edges].astype(np.int64),
            "begin": graph.source[edges].astype(np.int64),
            "finish": target[edges].astype(np.int64),
            "own_edge": edges.astype(np.int64),
        }
    ).unique(("rank", "event"), keep="first", maintain_order=True)


def _find_transfers(graph: Graph) -> pl.DataFrame:
    """Return for each rank's part in a matched communication its arrival point (of the last rank) and transfer edge."""
    target = graph.target
    frames = []
    for kinds, outside, arrival in (
        ((EdgeKind.ARRIVAL,), graph.source, target),
        (_TRANSFER_KINDS, target, graph.source),
    ):
        edges = np.flatnonzero(np.isin(graph.kind, kinds))
        frames.append(
            pl.DataFrame(
                {
                    "rank": graph.rank[outside[edges]].astype(np.int64),
                    "event": graph.owner[edges].astype(np.int64),
                    "arrival": arrival[edges].astype(np.int64),
                    "transfer_edge": edges if kinds is _TRANSFER_KINDS else np.full(len(edges), -1),
                }
            )
        )
    return (
        pl.concat(frames)
        .group_by("rank", "event")
        .agg(pl.col("arrival").first(), pl.col("transfer_edge").max())
    )
