"""Nesting of events on host threads: enclosing event, depth, exclusive time.

A track is one (pid, tid). Only timed host events are nested: operators, annotations, runtime and driver calls, Python
functions. GPU activity, instants, ranges without an end and records that end on another thread are not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom._native import nearest, stack_tracks
from etloom.core import categories
from etloom.core.arrays import is_in, match_text, to_array

TOLERANCE_NS = 1000
"""A child may end this much after its parent: files with whole microseconds truncate start and duration separately."""

_INT64_MAX = np.iinfo(np.int64).max
_MAX_LOOKUP_SIZE = 1 << 22

RECORD_FUNCTION_CATEGORIES = categories.OPERATOR_CATEGORIES | categories.ANNOTATION_CATEGORIES
"""Categories of what PyTorch records as a RecordFunction, which is what an execution trace holds too."""


@dataclass(frozen=True)
class Nesting:
    """The nesting of each event of a table; row numbers, not ids."""

    parent: np.ndarray
    """Row of the enclosing event (int64), -1 for none."""
    depth: np.ndarray
    """int16, -1 for events that are not nested."""
    exclusive: np.ndarray
    """Exclusive time (int64 ns): 0 for events that are not nested, the whole duration of a detached event."""
    detached: np.ndarray
    """Rows of events that end on another thread."""
    crossed: np.ndarray
    """Rows of events that end after the event around them, which they close."""
    clamped: np.ndarray
    """Rows of events that end at most TOLERANCE_NS after the event around them."""
    unclosed: np.ndarray
    """Rows of host ranges without an end."""
    entered: np.ndarray
    """Rows of the nested events in the order in which they were entered."""


def track_codes(events: pl.DataFrame, columns: Collection[str] = ("pid", "tid")) -> np.ndarray:
    """Return a number (int64) for the (pid, tid) of each event, ascending with it; equal for one thread."""
    code: np.ndarray | None = None
    for column in columns:
        distinct = np.sort(events[column].unique().drop_nulls().to_numpy())
        if distinct.size > 1 or events[column].null_count():
            ranks = _rank_values(distinct, events[column])
            if code is not None:
                code *= distinct.size + 1
                ranks += code
            code = ranks
    return np.zeros(events.height, np.int64) if code is None else code


def _rank_values(distinct: np.ndarray, column: pl.Series) -> np.ndarray:
    """Return the position of each value among the ascending distinct values; null comes last."""
    low, high = (int(distinct[0]), int(distinct[-1])) if distinct.size else (0, 0)
    ranks: np.ndarray
    if high - low > _MAX_LOOKUP_SIZE or high == _INT64_MAX:
        ranks = np.searchsorted(distinct, to_array(column, _INT64_MAX))
        return ranks
    # Process and thread ids are so close to each other that a lookup table is faster than a search.
    table = np.zeros(high - low + 2, np.int64)
    table[distinct - low] = np.arange(distinct.size)
    table[-1] = distinct.size
    ranks = table[to_array(column, high + 1) - low]
    return ranks


def order_by_track(tracks: np.ndarray) -> np.ndarray:
    """Return the rows sorted by these numbers from 0 (`track_codes`); rows of one track stay in order."""
    # Tracks are few, and sorting small numbers takes linear time.
    return np.argsort(tracks.astype(np.min_scalar_type(int(tracks.max(initial=0)))), kind="stable")


def group_by_track(tracks: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each track, in order."""
    rows = order_by_track(tracks)
    return np.split(rows, np.flatnonzero(np.diff(tracks[rows])) + 1) if rows.size else []


def nest_events(
    events: pl.DataFrame, nested_categories: Collection[str] = categories.HOST_CATEGORIES
) -> Nesting:
    """Nest the host events of a table.

    Events of one thread with the same start and end are put in the order in which they were entered: Python
    functions, operators by record function id and External id, calls. So the order of the file does not matter.

    A gloo range always ends on another thread. A range of another backend and an operator are assumed to do so if
    they end more than TOLERANCE_NS after an operator or annotation around them.

    Args:
        events: The table ``events``, sorted by (ts, -dur).
        nested_categories: Categories of the events to nest.
    """
    cats, names = events["cat"], events["name"]
    hosts = is_in(cats, nested_categories)
    timed = (events["ts"].is_not_null() & events["dur"].is_not_null()).to_numpy()
    ranges = match_text(names, categories.is_backend_range, is_in(cats, categories.ANNOTATION_CATEGORIES))
    asynchronous = match_text(names, lambda name: name.str.starts_with("gloo:"), ranges)
    rows = np.flatnonzero(hosts & timed & ~asynchronous)
    kind = (is_in(cats, categories.OPERATOR_CATEGORIES) | ranges) + 2 * is_in(
        cats, categories.PYTHON_CATEGORIES
    ).astype(np.uint8)

    durations = to_array(events["dur"], 0)
    start, duration = to_array(events["ts"], 0)[rows], durations[rows]
    tracks = track_codes(events)
    rows = _order_by_entry(events, rows, tracks, start, duration)
    duration += start
    parent, depth, exclusive, detached, crossed, clamped = stack_tracks(
        tracks[rows], start, duration, kind[rows], TOLERANCE_NS
    )
    n = events.height
    parent_rows = np.full(n, -1, np.int64)
    children = np.flatnonzero(parent >= 0)
    parent_rows[rows[children]] = rows[parent[children]]
    depths = np.full(n, -1, np.int16)
    depths[rows] = depth
    exclusive_ns = np.zeros(n, np.int64)
    exclusive_ns[rows] = exclusive
    gloo_rows = np.flatnonzero(asynchronous & hosts & timed)
    exclusive_ns[gloo_rows] = durations[gloo_rows]
    return Nesting(
        parent_rows,
        depths,
        exclusive_ns,
        detached=np.sort(np.concatenate([gloo_rows, rows[detached]])),
        crossed=rows[crossed],
        clamped=rows[clamped],
        unclosed=np.flatnonzero(hosts & ~timed & ~is_in(events["ph"], ("i", "I"))),
        entered=rows,
    )


def compute_exclusive_time(events: pl.DataFrame, *, operators_only: bool = False) -> pl.Series:
    """Return the exclusive time of each event in ns: its duration less that of the events directly inside it.

    Args:
        events: The table ``events``, sorted by (ts, -dur).
        operators_only: Count runtime and driver calls and Python functions as time of the operator around them.

    Returns:
        Null for events that are not nested (GPU activity); the whole duration of a record that ends on another thread.
    """
    nesting = nest_events(
        events, RECORD_FUNCTION_CATEGORIES if operators_only else categories.HOST_CATEGORIES
    )
    has_time = nesting.depth >= 0
    has_time[nesting.detached] = True
    return pl.Series("exclusive", nesting.exclusive).set(pl.Series(~has_time), None)


def find_nearest_ancestor(
    parent: np.ndarray, targets: np.ndarray, rows: np.ndarray | None = None
) -> np.ndarray:
    """Return the nearest target among each row and its ancestors, -1 for none.

    Args:
        parent: The row of the parent of each row, -1 for none.
        targets: Mask of the rows to look for.
        rows: The rows to start from (default: all); the result for -1 is -1.
    """
    dtype = np.int32 if len(parent) < np.iinfo(np.int32).max else np.int64
    ancestors: np.ndarray = nearest(
        np.ascontiguousarray(parent, dtype), np.ascontiguousarray(targets, np.bool_)
    )
    return ancestors[:-1] if rows is None else ancestors[rows].astype(np.int64)


def _order_by_entry(
    events: pl.DataFrame,
    rows: np.ndarray,
    tracks: np.ndarray,
    start: np.ndarray,
    duration: np.ndarray,
) -> np.ndarray:
    """Reorder rows that are sorted by (start, -duration): equal ones of a thread by the recorder's ids of their order.

    start and duration have one entry per row of ``rows``.
    """
    if rows.size < 2:
        return rows
    same = (start[1:] == start[:-1]) & (duration[1:] == duration[:-1])
    if not same.any():
        return rows
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    # Among tied rows, one that differs from its predecessor starts a group.
    group = np.cumsum(~np.append(False, same)[tied])
    ties = events[rows[tied]]
    kind = np.where(
        is_in(ties["cat"], categories.RUNTIME_CATEGORIES),
        2,
        np.where(is_in(ties["cat"], categories.PYTHON_CATEGORIES), 0, 1),
    )
    missing = np.iinfo(np.int64).max
    order = np.lexsort(
        [
            ties["position"].fill_null(0).to_numpy(),
            ties["external_id"].fill_null(missing).to_numpy(),
            ties["rf_id"].replace(0, None).fill_null(missing).to_numpy(),
            kind,
            tracks[rows[tied]],
            group,
        ]
    )
    rows = rows.copy()
    rows[tied] = rows[tied[order]]
    return rows
