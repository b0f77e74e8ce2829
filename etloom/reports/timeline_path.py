"""The critical path on the timeline of one rank, as time intervals.

An event may be on the path for a part of its time only: a call that waits is on it from the moment at which it alone
delays the run. A piece is such a part; time that belongs to no event (launch delays, Python) is a piece without one.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core.arrays import rows_of_ids, to_array


def select_pieces(path: pl.DataFrame, rank: int) -> pl.DataFrame:
    """Return the critical path on a rank as intervals in time order: event (id or null), start and end in ns.

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
    """Split path intervals by plotted event: place (1 + row in ``plotted``, 0 for none), start, dur (ns).

    A piece is clipped to its event; the part outside of it, such as the delay before a kernel, has no event.

    Args:
        plotted: The plotted events: id, ts, dur.
    """
    place = rows_of_ids(plotted, pieces["event"].cast(pl.Int64))
    is_placed = place >= 0
    start, end = pieces["start"].to_numpy(), pieces["end"].to_numpy()
    event_start = plotted["ts"].to_numpy()[place] if plotted.height else start
    event_end = event_start + to_array(plotted["dur"], 0)[place] if plotted.height else end
    begin = np.where(is_placed, np.minimum(np.maximum(start, event_start), end), end)
    finish = np.where(is_placed, np.maximum(begin, np.minimum(end, event_end)), end)
    nowhere = np.zeros(len(place), np.int64)
    places = np.concatenate((place + 1, nowhere, nowhere))
    starts = np.concatenate((begin, start, finish))
    ends = np.concatenate((finish, begin, end))
    parts = np.flatnonzero(ends > starts)
    parts = parts[np.lexsort((starts[parts], places[parts]))]
    return pl.DataFrame(
        {
            "place": places[parts].astype(np.uint32),
            "start": starts[parts],
            "dur": ends[parts] - starts[parts],
        }
    )
