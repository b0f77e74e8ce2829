"""What encloses what on each host thread, and how long each event itself took.

A lane is one (pid, tid). Only timed host events stand on lanes: operators, annotations, runtime and driver
calls, Python functions. Device work, instants, ranges that were never closed and records that end on another
thread do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import polars as pl

from etloom._native import nearest as nearest_wanted
from etloom._native import stack_lanes
from etloom.core import categories as kinds

TOLERANCE_NS = 1000
"""A child may outlast its parent by this much: files with whole microseconds cut start and duration apart."""

_LAST = np.iinfo(np.int64).max
_MAX_LOOKUP_SIZE = 1 << 22
_NULL_ID = np.iinfo(np.uint32).max  # -1 as int32

RECORD_FUNCTION_CATEGORIES = kinds.OPERATOR_CATEGORIES | kinds.ANNOTATION_CATEGORIES
"""Categories of what PyTorch records as a RecordFunction, which is what an execution trace holds too."""


def is_in(column: pl.Series, values: Collection[str]) -> np.ndarray:
    """Which rows of a text column hold one of these values; null holds none."""
    return column.is_in(list(values), nulls_equal=True).to_numpy()


def match_text(
    column: pl.Series,
    question: Callable[[pl.Expr], pl.Expr],
    of: np.ndarray | None = None,
    texts: pl.Series | None = None,
) -> np.ndarray:
    """Which rows of a text column a question is true of: asked once a distinct text, false of null.

    of: the rows that matter (a mask); of few of them the answer takes less time. texts: all that the column holds,
    each once, where that is known: to find it takes longer than to ask.
    """
    if of is not None:
        found = np.zeros(len(column), np.bool_)
        found[of] = match_text(column.filter(pl.Series(of)), question)
        return found
    texts = (column.unique() if texts is None else texts).drop_nulls()
    true = texts.filter(texts.to_frame("text").select(question(pl.col("text").cast(pl.String))).to_series())
    return column.is_in(true.implode(), nulls_equal=True).to_numpy()


def map_text(column: pl.Series, text: Callable[[pl.Expr], pl.Expr]) -> pl.Series:
    """A text column with an expression put to it, once a distinct text; Categorical."""
    known = column.unique().to_frame("text")
    known = known.with_columns(text(pl.col("text").cast(pl.String)).cast(pl.Categorical).alias("new"))
    joined = column.to_frame("text").join(
        known, on="text", how="left", maintain_order="left", nulls_equal=True
    )
    return joined["new"].alias(column.name)


def to_array(column: pl.Series, absent: int) -> np.ndarray:
    """A column of integers as an array, ``absent`` in place of null."""
    if not column.null_count():
        return column.to_numpy()
    return column.cast(pl.Int64).fill_null(absent).to_numpy()


def rows_of_ids(
    table: pl.DataFrame, ids: pl.Series, dtype: type[np.int64] | type[np.int32] = np.int64
) -> np.ndarray:
    """Return the row of each id in a table, -1 for null and for an id that the table lacks.

    Args:
        table: A table with a column ``id``, in any order; of several rows of one id the first counts.
        ids: The ids to look up.
        dtype: The type of the rows; int32 saves memory and a copy where the table has fewer rows than that.
    """
    known = table["id"].to_numpy()
    size = int(known.max()) + 1 if known.size else 0
    rows: np.ndarray
    if dtype is np.int32 and ids.dtype == pl.UInt32:
        rows = ids.fill_null(_NULL_ID).to_numpy().view(np.int32)
    else:
        rows = to_array(ids, -1).astype(dtype)
    if size > 64 * known.size + 4096:  # sparse ids: a lookup table would be as large as the greatest id
        order = np.argsort(known, kind="stable")
        candidates = order[np.minimum(np.searchsorted(known[order], rows), known.size - 1)]
        return np.where(known[candidates] == rows, candidates, -1).astype(dtype)
    if rows.max(initial=-1) >= size:
        rows = np.where(rows < size, rows, dtype(-1))
    # In a table that is complete the ids are the row numbers.
    if not (size == known.size and size and known[0] == 0 and (known[1:] > known[:-1]).all()):
        row_by_id = np.full(size + 1, -1, dtype=dtype)  # the last entry stands for -1
        row_by_id[known[::-1]] = np.arange(known.size, dtype=dtype)[::-1]
        rows = row_by_id[rows]
    return rows


_Table = TypeVar("_Table", pl.Series, pl.DataFrame)


def take_rows(table: _Table, rows: np.ndarray) -> _Table:
    """These rows of a column or a table, null at -1."""
    return table[pl.Series(np.maximum(rows, 0).astype(np.uint32)).set(pl.Series(rows < 0), None)]


@dataclass(frozen=True)
class Nesting:
    """Per event, in the order of the table it was computed from; row numbers, not ids.

    ``parent`` (int64, -1 for none), ``depth`` (int16, -1 off the lanes), ``exclusive`` (int64 ns, 0 off the
    lanes, the whole duration of a detached event). ``detached``: rows that end on another thread.
    ``crossed``: rows that closed the event around them by outlasting it. ``clamped``: rows that stick out by
    at most TOLERANCE_NS. ``unclosed``: rows of host ranges without an end.
    """

    parent: np.ndarray
    depth: np.ndarray
    exclusive: np.ndarray
    detached: np.ndarray
    crossed: np.ndarray
    clamped: np.ndarray
    unclosed: np.ndarray
    entered: np.ndarray


def track_codes(events: pl.DataFrame, columns: Collection[str] = ("pid", "tid")) -> np.ndarray:
    """A number for each event's (pid, tid), int64, in their order; the same number for the same thread."""
    code: np.ndarray | None = None
    for column in columns:
        distinct = np.sort(events[column].unique().drop_nulls().to_numpy())
        if distinct.size > 1 or events[column].null_count():
            places = _rank_values(distinct, events[column])
            if code is not None:
                code *= distinct.size + 1
                places += code
            code = places
    return np.zeros(events.height, np.int64) if code is None else code


def _rank_values(distinct: np.ndarray, column: pl.Series) -> np.ndarray:
    """Where each value stands among the distinct ones, which ascend; null behind them all."""
    low, high = (int(distinct[0]), int(distinct[-1])) if distinct.size else (0, 0)
    if high - low > _MAX_LOOKUP_SIZE or high == _LAST:
        found: np.ndarray = np.searchsorted(distinct, to_array(column, _LAST))
        return found
    # Numbers of processes and threads lie so close that a table of them takes less time than to search.
    table = np.zeros(high - low + 2, np.int64)
    table[distinct - low] = np.arange(distinct.size)
    table[-1] = distinct.size
    places: np.ndarray = table[to_array(column, high + 1) - low]
    return places


def sort_by_track(lanes: np.ndarray) -> np.ndarray:
    """The rows in order of these numbers from 0 (`lane_codes`), those of one lane in their own order."""
    # Lanes are few, and to sort small numbers takes linear time.
    return np.argsort(lanes.astype(np.min_scalar_type(int(lanes.max(initial=0)))), kind="stable")


def group_by_track(lanes: np.ndarray) -> list[np.ndarray]:
    """The rows of each lane, in their order."""
    rows = sort_by_track(lanes)
    return np.split(rows, np.flatnonzero(np.diff(lanes[rows])) + 1) if rows.size else []


def nest_events(events: pl.DataFrame, categories: Collection[str] = kinds.HOST_CATEGORIES) -> Nesting:
    """Nest the host events of a table sorted by (ts, -dur); ``categories``: those that stand on lanes.

    Events of one thread with the same start and end are put in the order in which they were entered: Python
    functions, operators by record function id and External id, calls. So the order of the file is no matter.

    A gloo range always ends on another thread. Any other backend's range, and an operator, is taken to do so
    where it outlasts an operator or annotation around it by more than TOLERANCE_NS.
    """
    cats, names = events["cat"], events["name"]
    hosts = is_in(cats, categories)
    timed = (events["ts"].is_not_null() & events["dur"].is_not_null()).to_numpy()
    ranges = match_text(names, kinds.is_backend_range, is_in(cats, kinds.ANNOTATION_CATEGORIES))
    asynchronous = match_text(names, lambda name: name.str.starts_with("gloo:"), ranges)
    rows = np.flatnonzero(hosts & timed & ~asynchronous)
    kind = (is_in(cats, kinds.OPERATOR_CATEGORIES) | ranges) + 2 * is_in(
        cats, kinds.PYTHON_CATEGORIES
    ).astype(np.uint8)

    durations = to_array(events["dur"], 0)
    start, duration = to_array(events["ts"], 0)[rows], durations[rows]
    lanes = track_codes(events)
    rows = _sort_by_entry(events, rows, lanes, start, duration)
    duration += start
    parent, depth, exclusive, detached, crossed, clamped = stack_lanes(
        lanes[rows], start, duration, kind[rows], TOLERANCE_NS
    )
    n = events.height
    out_parent = np.full(n, -1, np.int64)
    held = np.flatnonzero(parent >= 0)
    out_parent[rows[held]] = rows[parent[held]]
    out_depth = np.full(n, -1, np.int16)
    out_depth[rows] = depth
    out_exclusive = np.zeros(n, np.int64)
    out_exclusive[rows] = exclusive
    off = np.flatnonzero(asynchronous & hosts & timed)
    out_exclusive[off] = durations[off]
    return Nesting(
        out_parent,
        out_depth,
        out_exclusive,
        detached=np.sort(np.concatenate([off, rows[detached]])),
        crossed=rows[crossed],
        clamped=rows[clamped],
        unclosed=np.flatnonzero(hosts & ~timed & ~is_in(events["ph"], ("i", "I"))),
        entered=rows,
    )


def compute_exclusive_time(events: pl.DataFrame, *, operators_only: bool = False) -> pl.Series:
    """Exclusive time of each event, ns: its duration less that of the events directly inside it.

    With ``operators_only`` runtime and driver calls and Python functions count as their operator's own time.
    Null for what stands on no lane (device work); the whole duration of a record that ends on another thread.
    """
    stacks = nest_events(events, RECORD_FUNCTION_CATEGORIES if operators_only else kinds.HOST_CATEGORIES)
    known = stacks.depth >= 0
    known[stacks.detached] = True
    return pl.Series("exclusive", stacks.exclusive).set(pl.Series(~known), None)


def find_nearest_ancestor(
    parent: np.ndarray, wanted: np.ndarray, rows: np.ndarray | None = None
) -> np.ndarray:
    """For each of ``rows`` (default: all; -1 is no row) the nearest wanted row among it and those around it, -1 for
    none."""
    small = np.int32 if len(parent) < np.iinfo(np.int32).max else np.int64
    found: np.ndarray = nearest_wanted(
        np.ascontiguousarray(parent, small), np.ascontiguousarray(wanted, np.bool_)
    )
    return found[:-1] if rows is None else found[rows].astype(np.int64)


def _sort_by_entry(
    events: pl.DataFrame,
    rows: np.ndarray,
    lanes: np.ndarray,
    start: np.ndarray,
    duration: np.ndarray,
) -> np.ndarray:
    """Rows sorted by (start, -duration), equal ones of a thread by what the recorder knows of their order; start and
    duration are of each of rows."""
    if rows.size < 2:
        return rows
    same = (start[1:] == start[:-1]) & (duration[1:] == duration[:-1])
    if not same.any():
        return rows
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    # Of two neighbours among them that are not the same, the second begins a group.
    group = np.cumsum(~np.append(False, same)[tied])
    some = events[rows[tied]]
    kind = np.where(
        is_in(some["cat"], kinds.RUNTIME_CATEGORIES),
        2,
        np.where(is_in(some["cat"], kinds.PYTHON_CATEGORIES), 0, 1),
    )
    missing = np.iinfo(np.int64).max
    order = np.lexsort(
        [
            some["position"].fill_null(0).to_numpy(),
            some["external_id"].fill_null(missing).to_numpy(),
            some["rf_id"].replace(0, None).fill_null(missing).to_numpy(),
            kind,
            lanes[rows[tied]],
            group,
        ]
    )
    rows = rows.copy()
    rows[tied] = rows[tied[order]]
    return rows
