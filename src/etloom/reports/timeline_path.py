"""The critical path on the timeline of one rank, as time intervals.

An event may be on the path for a part of its time only: a call that waits is on it from the moment at which it alone
delays the run. A piece is such a part; time that belongs to no event (launch delays, Python) is a piece without one.

The page gets the pieces in time order, as what cannot be derived from the events and the pieces before:

- ``path_row``: 1 + the row of its event; 0 for no event.
- ``path_move``: the index of its event minus the index of the last event on the path in that row (at first: the first
  event of the row).
- ``path_gap``: its start minus the end of the piece before.
- ``path_rest``: its end minus the start of the next piece's event, if that is after its start and before the end of its
  own event; else its end minus the end of its own event (of a piece without an event: minus its start).
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.arrays import make_frame, rows_of_ids, take_rows, to_array
from etloom.reports.packed_columns import Column, encode_column

_NEVER = np.iinfo(np.int64).min
"""The start of no event; the page may count from a later time than the start of the path."""


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
    """Split path intervals by plotted event, in time order: place (1 + row in ``plotted``, 0: none), start, dur (ns).

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
    parts = parts[np.lexsort((places[parts], starts[parts]))]
    return make_frame(
        {
            "place": places[parts].astype(np.uint32),
            "start": starts[parts],
            "dur": ends[parts] - starts[parts],
        }
    )


def encode_pieces(
    pieces: pl.DataFrame, plotted: pl.DataFrame, rows: NDArray[np.int64], origin: int
) -> list[Column]:
    """Return the columns of the path of a rank.

    Args:
        pieces: As `select_pieces` returns them.
        plotted: The plotted events by row and start: id, ts, dur.
        rows: The number of each event's row.
        origin: The time from which the page counts, ns.
    """
    placed = place_pieces(pieces, plotted)
    place = placed["place"].to_numpy().astype(np.int64)
    start = placed["start"].to_numpy() - origin
    end = start + placed["dur"].to_numpy()
    has_event, event = place > 0, np.maximum(place - 1, 0)
    event_starts = plotted["ts"].to_numpy() - origin
    event_ends = event_starts + to_array(plotted["dur"], 0)
    row, begin, stop = np.zeros_like(place), np.full_like(start, _NEVER), start.copy()
    row[has_event] = rows[event[has_event]] + 1
    begin[has_event] = event_starts[event[has_event]]
    stop[has_event] = event_ends[event[has_event]]
    following = np.append(begin[1:], _NEVER)[: begin.size]
    is_inside = (following > start) & ((following < stop) | ~has_event)
    return [
        encode_column("path_row", "u32", pl.Series(row), by_difference=True),
        encode_column("path_move", "signed", pl.Series(_measure_moves(event, row, rows))),
        encode_column("path_gap", "signed", pl.Series(start - np.append(0, end)[: start.size])),
        encode_column("path_rest", "signed", pl.Series(end - np.where(is_inside, following, stop))),
    ]


def _measure_moves(
    event: NDArray[np.int64], row: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the column ``path_move`` of the module's docstring. ``row``: of each piece; ``rows``: of each event."""
    first = np.searchsorted(rows, np.maximum(row - 1, 0))
    order = np.argsort(row, kind="stable")
    is_first = np.diff(row[order], prepend=-1) != 0
    moves = np.zeros_like(event)
    before = np.append(0, event[order])[: event.size]
    moves[order] = event[order] - np.where(is_first, first[order], before)
    moves[row == 0] = 0
    return moves
