"""The pieces of the critical path on the timeline of one rank.

An event may be on the path for a part of its time only: a call that waits is on it from where nothing else holds up
the run. A piece is such a part; time that belongs to no event (launch delays, Python) is a piece without one.
"""

from __future__ import annotations

import polars as pl


def select_pieces(path: pl.DataFrame, rank: int) -> pl.DataFrame:
    """Return the pieces of the path on a rank in time order: event (id, null for none), start, end.

    Consecutive edges of one event are one piece.

    Args:
        path: The critical path by edge, as `etloom.analyses.critical_path` returns it.
    """
    edges = path.filter((pl.col("rank") == rank) & (pl.col("time_ns") > 0)).select(
        "event", start="start_ns", end=pl.col("start_ns") + pl.col("time_ns")
    )
    continues = pl.col("event").eq_missing(pl.col("event").shift(1)) & (
        pl.col("start") == pl.col("end").shift(1)
    )
    piece = (~continues.fill_null(False)).cum_sum().alias("piece")
    return (
        edges.with_columns(piece)
        .group_by("piece", maintain_order=True)
        .agg(pl.col("event", "start").first(), pl.col("end").last())
        .drop("piece")
    )


def place_pieces(pieces: pl.DataFrame, plotted: pl.DataFrame) -> pl.DataFrame:
    """Return the pieces by plotted event: place (1 + the row of the event in ``plotted``, 0 for none), start, dur.

    A piece is clipped to its event; the part outside of it, such as the delay before a kernel, has no event.

    Args:
        plotted: The plotted events: id, ts, dur.
    """
    places = plotted.select(
        pl.col("id").cast(pl.Int64).alias("event"),
        pl.int_range(1, pl.len() + 1, dtype=pl.UInt32).alias("place"),
        pl.col("ts").alias("from"),
        (pl.col("ts") + pl.col("dur").fill_null(0)).alias("to"),
    )
    located = pieces.with_columns(pl.col("event").cast(pl.Int64)).join(places, on="event", how="left")
    begin = pl.max_horizontal("start", "from").clip(upper_bound=pl.col("end"))
    inside = pl.struct(begin.alias("a"), pl.max_horizontal(begin, pl.min_horizontal("end", "to")).alias("b"))
    located = located.with_columns(inside.alias("inside")).unnest("inside")
    is_placed = pl.col("place").is_not_null()
    parts = (
        located.filter(is_placed).select("place", start="a", end="b"),
        located.filter(is_placed).select(place=pl.lit(0, pl.UInt32), start="start", end="a"),
        located.filter(is_placed).select(place=pl.lit(0, pl.UInt32), start="b", end="end"),
        located.filter(~is_placed).select(place=pl.lit(0, pl.UInt32), start="start", end="end"),
    )
    return (
        pl.concat(parts)
        .filter(pl.col("end") > pl.col("start"))
        .select("place", "start", dur=pl.col("end") - pl.col("start"))
        .sort("place", "start")
    )
