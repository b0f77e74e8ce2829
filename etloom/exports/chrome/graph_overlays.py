"""Builds arrows between slices from the dependency graph: the critical path, or all edges."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.graphs.critical_paths import find_critical_path
from etloom.graphs.graph import EdgeKind

ARROW_NAME = "critical path"
EDGE_CATEGORY = "dependency"


def build_critical_path_arrows(traces: Mapping[int, Trace], first: int) -> dict[int, pl.DataFrame]:
    """Build an arrow from each event on the path to the next one.

    It starts at the last moment at which the path is in the first event, and ends at the first moment at which it is
    in the second.

    Args:
        traces: Linked trace of each rank.
        first: Number of the first arrow.

    Returns:
        Rank -> the ends of arrows on its slices: ph, cat, name, ts, flow (number of the arrow), id (of the event).
    """
    path = find_critical_path(build_graph(Job(dict(traces))).graph).drop_nulls("event")
    pieces = (
        path.with_columns(run=pl.struct("rank", "event").rle_id())
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("rank", "event").first(),
            start=pl.col("start_ns").min(),
            end=(pl.col("start_ns") + pl.col("time_ns")).max(),
        )
    )
    pieces = pl.concat(
        _clip_to_slices(pieces.filter(pl.col("rank") == rank), trace.events) for rank, trace in traces.items()
    ).sort("run")
    flow = pl.int_range(pl.len()) + first
    leave = pieces.head(-1).select("rank", "event", ts="end", flow=flow, ph=pl.lit("s"))
    reach = pieces.tail(-1).select("rank", "event", ts="start", flow=flow, ph=pl.lit("f"))
    ends = pl.concat((leave, reach)).with_columns(cat=pl.lit(ARROW_NAME), name=pl.lit(ARROW_NAME))
    return {
        rank: ends.filter(pl.col("rank") == rank).select("ph", "cat", "name", "ts", "flow", id="event")
        for rank in traces
    }


def _clip_to_slices(pieces: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Clip start and end to the slice of the event, because an arrow is bound to the slices at its ends."""
    slices = events.select("id", low="ts", high=pl.col("ts") + (pl.col("dur").fill_null(0) - 1).clip(0))
    joined = pieces.with_columns(pl.col("event").cast(pl.UInt32)).join(slices, left_on="event", right_on="id")
    return joined.with_columns(pl.col("start", "end").clip(pl.col("low"), pl.col("high"))).drop("low", "high")


def build_edge_arrows(trace: Trace, first: int) -> pl.DataFrame:
    """Build an arrow for each edge of the dependency graph between different events of one rank.

    Args:
        trace: A linked trace.
        first: Number of the first arrow.

    Returns:
        The ends of the arrows: name (kind of the edge), ts, flow (number of the arrow), id (of the event), ph, cat.
    """
    graph = build_graph(Job({trace.rank or 0: trace})).graph
    source, target = graph.source, graph.target
    joins_events = (
        (graph.event[source] >= 0) & (graph.event[target] >= 0) & (graph.event[source] != graph.event[target])
    )
    labels = pl.Series([EdgeKind(code).label for code in graph.kind[joins_events]], dtype=pl.String)
    flow = pl.Series(np.arange(first, first + labels.len()))
    ends = (("s", source[joins_events]), ("f", target[joins_events]))
    return pl.concat(
        pl.DataFrame(
            {"name": labels, "ts": graph.time[points], "flow": flow, "id": graph.event[points]}
        ).with_columns(ph=pl.lit(ph), cat=pl.lit(EDGE_CATEGORY))
        for ph, points in ends
    )
