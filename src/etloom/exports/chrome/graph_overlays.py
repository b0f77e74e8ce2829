"""Build arrows between slices for Chrome traces from the dependency graph: the critical path, or all edges."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.graphs.algorithms import find_longest_path
from etloom.graphs.critical_paths import find_critical_path
from etloom.graphs.graph import EdgeKind

ARROW_NAME = "critical path"


def find_critical_pieces(traces: Mapping[int, Trace]) -> pl.DataFrame:
    """Return the events on the critical path in its order: rank, event, and start and end (ns) of the path in it.

    Args:
        traces: Linked trace of each rank.
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
    return pl.concat(
        _clip_to_slices(pieces.filter(pl.col("rank") == rank), trace.events, "start", "end")
        for rank, trace in traces.items()
    ).sort("run")


def build_critical_path_arrows(traces: Mapping[int, Trace], first: int) -> dict[int, pl.DataFrame]:
    """Build an arrow from each event on the critical path to the next event on it, for each rank.

    It starts at the last moment at which the path is in the first event, and ends at the first moment at which it is
    in the second.

    Args:
        traces: Linked trace of each rank.
        first: Number of the first arrow.

    Returns:
        Rank -> the ends of arrows on its slices: ph, cat, name, ts, flow (number of the arrow), id (of the event).
    """
    pieces = find_critical_pieces(traces)
    flow = pl.int_range(pl.len()) + first
    leave = pieces.head(-1).select("rank", "event", ts="end", flow=flow, ph=pl.lit("s"))
    reach = pieces.tail(-1).select("rank", "event", ts="start", flow=flow, ph=pl.lit("f"))
    ends = pl.concat((leave, reach)).with_columns(cat=pl.lit(ARROW_NAME), name=pl.lit(ARROW_NAME))
    return {
        rank: ends.filter(pl.col("rank") == rank).select("ph", "cat", "name", "ts", "flow", id="event")
        for rank in traces
    }


def _clip_to_slices(pieces: pl.DataFrame, events: pl.DataFrame, *times: str) -> pl.DataFrame:
    """Clip the columns ``times`` (ns) to the duration of the row's event, since arrows must end within its slice."""
    slices = events.select("id", low="ts", high=pl.col("ts") + (pl.col("dur").fill_null(0) - 1).clip(0))
    joined = pieces.with_columns(pl.col("event").cast(pl.UInt32)).join(slices, left_on="event", right_on="id")
    return joined.with_columns(pl.col(times).clip(pl.col("low"), pl.col("high"))).drop("low", "high")


def build_edge_arrows(trace: Trace, first: int) -> pl.DataFrame:
    """Build an arrow for each edge of a rank's dependency graph that connects two different events.

    Args:
        trace: A linked trace.
        first: Number of the first arrow.

    Returns:
        One row per end of an arrow: ph, ts, flow (number of the arrow), id (of the event), and columns of the edge:
        kind, category (of the event that takes the edge's time), time_ns, is_critical (it is on the critical path).
    """
    graph = build_graph(Job({trace.rank or 0: trace})).graph
    source, target = graph.source, graph.target
    is_critical = np.zeros(source.size, dtype=np.bool_)
    is_critical[find_longest_path(graph)] = True
    joins_events = (
        (graph.event[source] >= 0) & (graph.event[target] >= 0) & (graph.event[source] != graph.event[target])
    )
    time = graph.time[target] - graph.time[source]
    owner = rows_of_ids(trace.events, pl.Series(graph.owner[joins_events]))
    edges = pl.DataFrame(
        {
            "kind": pl.Series([EdgeKind(code).label for code in graph.kind[joins_events]], dtype=pl.String),
            "category": take_rows(trace.events["cat"], owner),
            "time_ns": time[joins_events],
            "is_critical": is_critical[joins_events],
        }
    ).with_columns(flow=pl.int_range(pl.len()) + first)
    ends = (("s", source[joins_events]), ("f", target[joins_events]))
    arrows = pl.concat(
        edges.with_columns(ph=pl.lit(ph), ts=graph.time[points], event=graph.event[points])
        for ph, points in ends
    )
    return _clip_to_slices(arrows, trace.events, "ts").rename({"event": "id"})
