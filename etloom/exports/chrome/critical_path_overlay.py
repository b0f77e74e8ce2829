"""Builds arrows that connect the slices on the critical path."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from etloom.core.trace import Job, Trace
from etloom.graphs import build_graph
from etloom.graphs.critical_paths import find_critical_path

ARROW_NAME = "critical path"


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
