"""Computes how events nest on host threads: enclosing event, depth, exclusive time; and finds enclosing intervals.

A track is one (pid, tid). Only timed host events are nested: operators, annotations, runtime and driver calls, Python
functions. GPU activity, instants, ranges without an end and records that end on another thread are not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from etloom._native import nearest, number_pairs, stack_tracks
from etloom.core import categories, text_codes
from etloom.core.arrays import find_values, is_in, is_present, take_rows, to_array
from etloom.core.categories import mask_events, match_names

TOLERANCE_NS = 1000
"""A child may end this much after its parent: files with whole microseconds truncate start and duration separately."""

_OPERATOR, _PYTHON, _CALL = 1, 2, 4
"""Kinds of events, as bits for `stack_tracks`; an annotation is 0."""
_ENTRY_ORDER = np.array([1, 1, 0, 0, 2])
"""The place of each kind among events of one start and duration."""

_INT64_MAX = np.iinfo(np.int64).max

RECORD_FUNCTION_CATEGORIES = categories.OPERATOR_CATEGORIES | categories.ANNOTATION_CATEGORIES
"""Categories of what PyTorch records as a RecordFunction, which is what an execution trace holds too."""


@dataclass(frozen=True)
class Nesting:
    """The nesting of the events of a table: parent, depth and exclusive time; refers to row numbers, not ids."""

    parent: np.ndarray
    """Row of the enclosing event (int64), -1 for none."""
    depth: np.ndarray
    """int16, -1 for events that are not nested."""
    exclusive: np.ndarray
    """Exclusive time (int64 ns): 0 for events that are not nested; the whole duration of an event that ends on another
    thread."""
    detached: np.ndarray
    """Rows of events that end on another thread."""
    crossed: np.ndarray
    """Rows of events that end more than TOLERANCE_NS after an event around them, on the same thread."""
    clamped: np.ndarray
    """Rows of events that end at most TOLERANCE_NS after the event around them."""
    unclosed: np.ndarray
    """Rows of host ranges without an end."""
    entered: np.ndarray
    """Rows of the nested events in the order in which they were entered."""


def track_codes(events: pl.DataFrame, columns: Sequence[str] = ("pid", "tid")) -> np.ndarray:
    """Return an integer code for the track (pid, tid) of each event: codes ascend with pid and tid, nulls last."""
    code, *others = (to_array(events[column], _INT64_MAX) for column in columns)
    for values in others:
        code = number_pairs(code, values)
    return code.astype(np.int64)


def order_by_track(tracks: np.ndarray) -> np.ndarray:
    """Return the row numbers sorted by track code (`track_codes`); rows of one track stay in order."""
    # Tracks are few, and sorting small numbers takes linear time.
    return np.argsort(tracks.astype(np.min_scalar_type(int(tracks.max(initial=0)))), kind="stable")


def group_by_track(tracks: np.ndarray) -> list[np.ndarray]:
    """Return one array of ascending row numbers per track, in order of the track codes."""
    rows = order_by_track(tracks)
    return np.split(rows, np.flatnonzero(np.diff(tracks[rows])) + 1) if rows.size else []


def nest_events(
    events: pl.DataFrame,
    nested_categories: Collection[str] = categories.HOST_CATEGORIES,
    python_ids: pl.Series | None = None,
) -> Nesting:
    """Compute which host event encloses each host event of a thread, its depth, and its exclusive time in ns.

    Events of one thread with the same start are put in the order in which they were entered, by the recorder's own
    numbers: see `_order_by_entry`. So the order of the file does not matter. An event without a duration that starts
    where another one ends is ambiguous: it is placed inside if events of these two names nest elsewhere in the trace,
    where their times are unambiguous; otherwise it follows.

    An event that ends more than TOLERANCE_NS after the events that enclose its start crosses them:

    - A gloo range always ends on another thread. A range of another backend and an operator are assumed to do so if
      they cross an operator, annotation or call; they close the Python functions that they cross.
    - A Python function is placed around what it crosses, and never closes it: its return may not have been recorded.
    - A call belongs to the event in which it starts.
    - An annotation is placed around operators that it crosses, and closes other events.

    Args:
        events: The table ``events``, sorted by (ts, -dur).
        nested_categories: Categories of the events to nest.
        python_ids: Python id of each event (``frames.python_id``), which counts Python functions as they are entered.
    """
    hosts = mask_events(events, nested_categories)
    timed = is_present(events["ts"]) & is_present(events["dur"])
    ranges = match_names(
        events, categories.BACKEND_RANGE, mask_events(events, categories.ANNOTATION_CATEGORIES)
    )
    asynchronous = match_names(events, "^gloo:", ranges)
    rows = np.flatnonzero(hosts & timed & ~asynchronous)
    kind = np.zeros(events.height, np.uint8)
    kind[mask_events(events, categories.OPERATOR_CATEGORIES) | ranges] = _OPERATOR
    kind[mask_events(events, categories.PYTHON_CATEGORIES)] = _PYTHON
    kind[mask_events(events, categories.RUNTIME_CATEGORIES)] = _CALL

    starts, durations = to_array(events["ts"], 0), to_array(events["dur"], 0)
    tracks = track_codes(events)
    rows = _order_by_entry(events, rows, tracks, kind, python_ids)
    start, end = starts[rows], starts[rows] + durations[rows]
    parent, depth, exclusive, detached, crossed, clamped = stack_tracks(
        tracks[rows],
        start,
        end,
        kind[rows],
        text_codes.read_codes(events["name"])[rows].astype(np.int64),
        TOLERANCE_NS,
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
    """Return for each row the nearest row in ``targets`` among itself and its ancestors; -1 for none.

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
    events: pl.DataFrame, rows: np.ndarray, tracks: np.ndarray, kind: np.ndarray, python_ids: pl.Series | None
) -> np.ndarray:
    """Sort rows of one track that start together in the order in which they were entered; rows are sorted by
    (ts, -dur).

    The recorder numbers operators (External id, record function id), calls (correlation) and Python functions (Python
    id) as they are entered. Between these, and without numbers, the longest is first; of equal ones a Python function,
    an operator, a call. Events of one kind keep the order of their numbers: if a later one of the kind precedes an
    event, so does an earlier one.
    """
    starts = events["ts"].to_numpy()[rows]
    same = starts[1:] == starts[:-1]
    if not same.any():
        return rows
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    places = rows[tied]
    sort, is_call = _ENTRY_ORDER[kind[places]], kind[places] == _CALL
    columns = [events[name] for name in ("external_id", "rf_id", "correlation")]
    columns = columns if python_ids is None else [*columns, python_ids]
    numbers = [to_array(take_rows(column, places), 0).astype(np.int64) for column in columns]
    for place, number in enumerate(numbers):  # null and 0 come last, as the numbers of another kind
        number[(number == 0) | (is_call != (place == 2))] = _INT64_MAX
    numbered = np.logical_or.reduce([number != _INT64_MAX for number in numbers])
    starts, durations = starts[tied], to_array(events["dur"], 0)[places]
    position = to_array(events["position"], _INT64_MAX)[places]
    order = np.lexsort((position, -durations, *numbers[::-1], sort, tracks[places], starts))
    starts, durations, sort = starts[order], durations[order], sort[order]
    groups = (starts, tracks[places][order], sort, numbered[order])
    # The longest among an event and those after it in its group: a maximum from the end, of ranks that rise by group.
    lengths, _, _ = find_values(durations)
    rank = np.searchsorted(lengths, durations)
    group = np.cumsum(np.append(False, np.logical_or.reduce([part[1:] != part[:-1] for part in groups])))
    offset = (group[-1] - group) * lengths.size
    longest = lengths[np.maximum.accumulate((rank + offset)[::-1])[::-1] - offset]
    rows = rows.copy()
    rows[tied] = places[order[np.lexsort((sort, -longest, groups[1], starts))]]
    return rows


def find_innermost(starts: ArrayLike, ends: ArrayLike, ticks: ArrayLike) -> NDArray[np.intp]:
    """Return the row of the innermost interval [start, end) that contains each time, -1 for none.

    Innermost is the window that begins last, and of those the one that ends first. Windows may come in any order,
    nested or not.
    """
    begin, end = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
    order = np.lexsort((-end, begin))
    order = order[begin[order] < end[order]]
    cuts, _, _ = find_values(np.concatenate((begin, end)))
    within = np.full(len(cuts) + 1, -1, dtype=np.intp)  # of what lies before the first cut, and behind each
    opened: list[int] = []  # by start: what has ended is dropped once it comes up
    coming = 0
    for place, cut in enumerate(cuts.tolist(), 1):
        while coming < len(order) and begin[order[coming]] <= cut:
            opened.append(int(order[coming]))
            coming += 1
        while opened and end[opened[-1]] <= cut:
            opened.pop()
        within[place] = opened[-1] if opened else -1
    times = np.asarray(ticks, dtype=np.int64)
    if len(times) > len(cuts) and (times[1:] >= times[:-1]).all():
        return np.repeat(within, np.diff(np.searchsorted(times, cuts), prepend=0, append=len(times)))
    return within[np.searchsorted(cuts, times, side="right")]
