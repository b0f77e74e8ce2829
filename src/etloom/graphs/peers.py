"""Compare ranks that run the same program: replace a rank's edge lags by the median over its peers.

Edges of two ranks correspond if they connect corresponding points. Points of two ranks correspond if they are of the
same kind (start, submission or end), and belong to events that have the same name, step, thread or stream, and position
among the events with these properties. This is the ideal of "Understanding Stragglers in Large Model
Training Using What-if Analysis" (Lin et al., OSDI 2025), operation by operation: work takes the median over the ranks
that do the same work, and the waits for each other follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.errors import EtloomError
from etloom.core.text import format_ranks, unknown_rank_error
from etloom.core.trace import Job, Trace
from etloom.graphs.algorithms import REMOVED_LAG
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import EdgeKind, Graph, Int64Array

MIN_OVERLAP = 0.8
"""Share of the events of two ranks that must have the same names for the ranks to run the same program."""

_OWN_WORK = (
    *(EdgeKind.SEGMENT, EdgeKind.IDLE, EdgeKind.KERNEL, EdgeKind.COMPLETE, EdgeKind.LAUNCH, EdgeKind.STREAM),
    *(EdgeKind.STREAM_WAIT, EdgeKind.SYNC, EdgeKind.HANDOFF, EdgeKind.RETURN),
)
"""Kinds of edges that are a rank's own time, unless they transfer data."""

_FROM_SEVERAL = (EdgeKind.STREAM_WAIT, EdgeKind.SYNC, EdgeKind.HANDOFF, EdgeKind.RETURN)
"""Kinds of which a point may have several incoming edges; their sources distinguish them."""


@dataclass(frozen=True, eq=False)
class PeerTimes:
    """Edge lags and start times of ranks, replaced by the median over peers: other ranks that run the same program.

    ``edges``: indices of the edges that change, ``lag``: their lags, ns. ``points`` without incoming edges that start
    at another time, ``start``: that time, ns. ``matched_ns``, ``own_ns``: the recorded lags of the changed ranks that
    have a counterpart, and all. ``alone``: ranks without peers.
    """

    edges: Int64Array
    lag: Int64Array
    points: Int64Array
    start: Int64Array
    matched_ns: int
    own_ns: int
    alone: tuple[int, ...]


def find_peers(job: Job) -> dict[int, int]:
    """Return rank -> group number; the ranks of a group run the same program (events of the same names)."""
    counts = {rank: dict(trace.compute_once(count_work_names).iter_rows()) for rank, trace in job.items()}
    models: list[dict[str, int]] = []
    groups: dict[int, int] = {}
    for rank, count in counts.items():
        group = next(
            (i for i, model in enumerate(models) if _overlap(model, count) >= MIN_OVERLAP), len(models)
        )
        if group == len(models):
            models.append(count)
        groups[rank] = group
    return groups


def count_work_names(trace: Trace) -> pl.DataFrame:
    """Return name and number of events of the operators, runtime calls and GPU activities of a rank."""
    cats = categories.OPERATOR_CATEGORIES | categories.RUNTIME_CATEGORIES | categories.DEVICE_CATEGORIES
    events = trace.events.filter(pl.Series(categories.mask_events(trace.events, cats)))
    return events.group_by(pl.col("name").cast(pl.String)).len().drop_nulls().sort("name")


def _overlap(a: dict[str, int], b: dict[str, int]) -> float:
    """Return the share (0 to 1) of the events of two ranks that have counterparts with the same name.

    ``a``, ``b``: number of events by name.
    """
    shared = sum(min(count, b.get(name, 0)) for name, count in a.items())
    return shared / max(sum(a.values()), sum(b.values()), 1)


def compute_peer_times(
    graph: Graph,
    job: Job,
    lag: Int64Array,
    communication: np.ndarray,
    ranks: Iterable[int] | None = None,
    *,
    across_steps: bool = False,
) -> PeerTimes:
    """Return edge lags and start times of ranks as the median over other ranks that run the same program.

    If no ranks are selected, the median is over all ranks.

    Args:
        lag: the lags to take medians of, per edge, ns.
        communication: mask of the edges that transfer data, which keep their lag.
        ranks: default: all.
        across_steps: take the mean over all ranks and steps instead, so that a rank alone has peers in other steps.
            The mean keeps the total; the median of many short host operations is below it.

    Raises:
        EtloomError: a rank is not in the job, or no rank has a peer.
    """
    chosen = set(job.ranks if ranks is None else ranks)
    for rank in chosen - set(job.ranks):
        raise unknown_rank_error(rank, job)
    groups = find_peers(job)
    sizes = np.bincount(list(groups.values()))
    alone = tuple(sorted(rank for rank in chosen if sizes[groups[rank]] < 2 and not across_steps))
    if len(alone) == len(chosen):
        raise EtloomError(
            f"no other rank runs the same program as {format_ranks(alone)}",
            remedy="a median of peers needs two or more ranks with the same operators and kernels",
        )
    points = pl.concat(
        _identify_points(graph, trace, rank, groups[rank], across_steps) for rank, trace in job.items()
    )
    edges, sources = _collect_edges(graph, lag, communication, points), _collect_sources(graph, points)
    in_chosen = pl.col("rank").is_in(list(chosen - set(alone)))
    excluded = [] if ranks is None else list(chosen)
    if across_steps:
        lags, starts = _take_means(edges), _take_medians(sources, in_chosen, excluded)
    else:
        lags, starts = (_take_medians(frame, in_chosen, excluded) for frame in (edges, sources))
        lags = _remove_extra_work(lags, edges, points, in_chosen, excluded)
    return PeerTimes(
        lags["index"].to_numpy(),
        lags["median"].to_numpy(),
        starts["index"].to_numpy(),
        starts["median"].to_numpy(),
        int(lag[lags["index"].to_numpy()].sum()),
        int(edges.filter(in_chosen)["value"].sum()),
        alone,
    )


def _take_means(frame: pl.DataFrame) -> pl.DataFrame:
    """Return for each edge (``index``) the mean lag, ns, of corresponding edges on all ranks and steps (``median``)."""
    mean = pl.col("value").mean().over("group", "key").round().cast(pl.Int64)
    return frame.select("index", median=mean)


def _remove_extra_work(
    lags: pl.DataFrame,
    edges: pl.DataFrame,
    points: pl.DataFrame,
    in_chosen: pl.Expr,
    excluded: list[int],
) -> pl.DataFrame:
    """Return the edge lags (``index``, ``median``), with lag 0 for work that most peers of a rank do not have."""
    extra = edges.filter(in_chosen).join(
        _find_extra_work(points, in_chosen, excluded), left_on="target", right_on="point", how="semi"
    )
    return pl.concat(
        [lags.join(extra, on="index", how="anti"), extra.select("index", median=pl.lit(0, pl.Int64))]
    )


def _identify_points(graph: Graph, trace: Trace, rank: int, group: int, across_steps: bool) -> pl.DataFrame:
    """Return the graph points of a rank's events, each with a hash that matches the same point on other ranks.

    With ``across_steps``, also of other steps.

    Columns: point (number), rank, group, name (hash), key (hash of track, step, name, role and occurrence).
    """
    points = np.flatnonzero((graph.rank == rank) & (graph.event >= 0))
    events = trace.events
    rows = rows_of_ids(events, pl.Series(graph.event[points]))
    facts = events.select(
        "pid", "tid", pl.col("step").fill_null(-1), pl.col("name").cast(pl.String).fill_null("").hash()
    )[rows]
    frame = facts.with_columns(
        point=pl.Series(points.astype(np.int64)), role=pl.Series(graph.role[points])
    ).with_columns(track=pl.col("point").min().over("pid", "tid").rank("dense"))
    same = ["track", "step", "name", "role"]
    compared = [name for name in same if name != "step" or not across_steps]
    key = pl.struct(*compared, pl.col("point").cum_count().over(same).alias("occurrence")).hash()
    return frame.select(
        "point",
        pl.lit(rank, pl.Int64).alias("rank"),
        pl.lit(group, pl.Int64).alias("group"),
        "name",
        key.alias("key"),
    )


def _collect_edges(
    graph: Graph, lag: Int64Array, communication: np.ndarray, points: pl.DataFrame
) -> pl.DataFrame:
    """Return a table of the edges that are a rank's work or waits, not transfers, with keys that match across ranks.

    Columns: index, target, rank, group, value (the lag, ns), key (hash, equal for corresponding edges).
    """
    edges = np.flatnonzero(np.isin(graph.kind, _OWN_WORK) & ~communication & (lag != REMOVED_LAG))
    kind = graph.kind[edges]
    kind = np.where(kind == EdgeKind.IDLE, EdgeKind.SEGMENT, kind).astype(np.uint8)
    frame = pl.DataFrame(
        {
            "index": edges,
            "target": graph.target[edges].astype(np.int64),
            "source": np.where(np.isin(kind, _FROM_SEVERAL), graph.source[edges], -1).astype(np.int64),
            "kind": kind,
            "value": lag[edges],
        }
    )
    sources = points.select("point", source_key="key")
    return (
        frame.join(points, left_on="target", right_on="point")
        .join(sources, left_on="source", right_on="point", how="left")
        .select(
            *("index", "target", "rank", "group", "value"), key=pl.struct("kind", "key", "source_key").hash()
        )
    )


def _collect_sources(graph: Graph, points: pl.DataFrame) -> pl.DataFrame:
    """Return a table of the graph points without incoming edges: index, rank, group, name, key, value (time, ns)."""
    sources = graph.sources.astype(np.int64)
    return pl.DataFrame({"index": sources, "value": graph.time[sources]}).join(
        points, left_on="index", right_on="point"
    )


def _take_medians(frame: pl.DataFrame, in_chosen: pl.Expr, excluded: list[int]) -> pl.DataFrame:
    """Return for each edge or point of the chosen ranks its index and the median value of the peers' counterparts.

    Rows without such peers are left out; of an even number of rows, the lower median is taken.
    """
    pool = frame.filter(~pl.col("rank").is_in(excluded))
    medians = pool.group_by("group", "key").agg(median=pl.col("value").sort().get((pl.len() - 1) // 2))
    return frame.filter(in_chosen).join(medians, on=["group", "key"]).select("index", "median")


def _find_extra_work(points: pl.DataFrame, in_chosen: pl.Expr, excluded: list[int]) -> pl.DataFrame:
    """Return the graph points of chosen ranks whose event name occurs on fewer than half of their peer ranks."""
    pool = points.filter(~pl.col("rank").is_in(excluded))
    sizes = pool.group_by("group").agg(size=pl.col("rank").n_unique())
    ranks_with = pool.group_by("group", "name").agg(ranks=pl.col("rank").n_unique())
    chosen = (
        points.filter(in_chosen).join(ranks_with, on=["group", "name"], how="left").join(sizes, on="group")
    )
    return chosen.filter(2 * pl.col("ranks").fill_null(0) < pl.col("size")).select("point")
