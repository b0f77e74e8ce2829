"""The critical path on the timeline of one rank, as time intervals.

An event may be on the path for a part of its time only: a call that waits is on it from the moment at which it alone
delays the run. A piece is such a part; time that belongs to no event (launch delays, Python) is a piece without one.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core.arrays import make_frame, rows_of_ids, take_rows, to_array


def select_pieces(path: pl.DataFrame, rank: int) -> pl.DataFrame:
    """Return the critical path on a rank as intervals in time order: event (id or null), start and end in ns.

    Consecutive edges of one event are one piece.

    Args:
        path: The critical path by edge, as `etloom.analyses.critical_path` returns it.
    """
    edges = np.flatnonzero((path["rank"].to_numpy() == rank) & (path["time_ns"].to_numpy() > 0))
    event = to_array(path["event"], -1)[edges]
    start = path["start_ns"].to_numpy()[edges]
    end = start + path["time_ns"].to_numpy()[edges]
    begins = np.append(True, (event[1:] != event[:-1]) | (start[1:] != end[:-1]))[: edges.size]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], edges.size)[: first.size] - 1
    return make_frame(
        {"event": take_rows(path["event"], edges[first]), "start": start[first], "end": end[last]}
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
    return make_frame(
        {
            "place": places[parts].astype(np.uint32),
            "start": starts[parts],
            "dur": ends[parts] - starts[parts],
        }
    )
