"""Finds the launch call of GPU activity that shares no id with one: by the file's arrows, else by order in time."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting
from etloom.core.trace import Trace

_TRACK = ["pid", "tid"]
_ROUNDING_NS = 1000
_ARROW = ["cat", "flow"]
_ENDS = ["at", "pid_start", "tid_start", "start_ts"]
_LAUNCHING_CALLS = (
    (("kernel", "Kernel"), r"(?i)launch|enqueue_?kernel|enqueuendrange"),
    (categories.MEMCPY_CATEGORIES, r"(?i)mem_?cpy|mem(?:ory)?_?copy|mem(?:ory)?buffer(?:read|write|copy)"),
    (categories.MEMSET_CATEGORIES, r"(?i)mem_?set|fill"),
)
"""Categories of activities, and a pattern of the names of the calls that launch them."""


def find_by_arrows(trace: Trace, work: np.ndarray, is_unlinked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Follow the file's arrows (flow events) back from device events.

    An arrow that ends where a device event begins is from its launch, and starts in the innermost host event there.
    Others, which end inside a device event, are from synchronizations.

    Args:
        trace: The trace, with placed events.
        work: Rows of device events.
        is_unlinked: Mask of those to look at.

    Returns:
        The row of the call, and of the operator, from which an arrow leads to each device event; -1 for none.
    """
    none = np.full(work.size, -1, np.int64)
    places = np.flatnonzero(is_unlinked)
    if not places.size or not trace.rows("flows"):
        return none, none
    events = trace.events
    flows = trace.flows.with_columns(pl.col("cat").cast(pl.String).fill_null("")).sort("ts")
    begins = events.select(*_TRACK, "ts")[work[places]].with_columns(at=pl.Series(places)).sort("ts")
    ends = flows.filter(pl.col("ph") == "f")
    heads = ends.join_asof(begins, on="ts", by=_TRACK, tolerance=_ROUNDING_NS, check_sortedness=False)
    heads = heads.drop_nulls("at")
    tails = flows.filter(pl.col("ph") == "s").select(*_ARROW, *_TRACK, "ts", start_ts="ts")
    before = heads.join_asof(tails, on="ts", by=_ARROW, suffix="_start", check_sortedness=False)
    other = before.filter(pl.col("start_ts").is_null()).select(heads.columns)
    only = other.join(tails.unique(_ARROW, keep="none"), on=_ARROW, suffix="_start", nulls_equal=True)
    arrows = pl.concat([before.drop_nulls("start_ts").select(_ENDS), only.select(_ENDS)])
    starts = arrows.rename({"pid_start": "pid", "tid_start": "tid", "start_ts": "ts"}).sort("ts")
    hosts = np.flatnonzero(_mask_placed(events, categories.HOST_CATEGORIES))
    sources = _find_innermost(events, starts, hosts, _TRACK)
    sources_by_kind = []
    for kinds in (categories.RUNTIME_CATEGORIES, categories.OPERATOR_CATEGORIES):
        rows = none.copy()
        is_kind = arrays.select_values(categories.mask_events(events, kinds), sources, False)
        rows[starts["at"].to_numpy()[is_kind]] = sources[is_kind]
        sources_by_kind.append(rows)
    return sources_by_kind[0], sources_by_kind[1]


def _find_innermost(
    events: pl.DataFrame, points: pl.DataFrame, rows: np.ndarray, track: list[str]
) -> np.ndarray:
    """Return the row of the innermost host event around each point of a track; -1 for none.

    Args:
        events: The table ``events``, placed.
        points: The columns ``track`` and ts, sorted by ts.
        rows: Rows of the host events to look at, and those around them.
        track: The columns that an event and a point on one track share.
    """
    begun = events.select(*track, "ts")[rows].with_columns(row=pl.Series(rows))
    joined = points.join_asof(begun, on="ts", by=track, check_sortedness=False)
    nearest_rows = arrays.to_array(joined["row"], -1).astype(np.int64)
    ends = arrays.to_array(events["ts"], 0) + arrays.to_array(events["dur"], 0)
    parent = arrays.rows_of_ids(events, events["parent"])
    times = points["ts"].to_numpy()
    while (over := np.flatnonzero((nearest_rows >= 0) & (ends[nearest_rows] < times))).size:
        nearest_rows[over] = parent[nearest_rows[over]]
    return nearest_rows


def find_by_order(events: pl.DataFrame, work: np.ndarray) -> np.ndarray:
    """Pair device events with calls by order, where each kind of call launched on one thread for one stream.

    A stream is first in, first out. The pairs of a kind count only if there are as many calls as activities, and no
    activity begins before its call.

    Args:
        events: The table ``events``, placed.
        work: Rows of device events.

    Returns:
        The row of the call of each device event; -1 for none.
    """
    matches = np.full(work.size, -1, np.int64)
    is_call = _mask_placed(events, categories.RUNTIME_CATEGORIES)
    parent = arrays.rows_of_ids(events, events["parent"])
    starts = arrays.to_array(events["ts"], 0)
    for kinds, pattern in _LAUNCHING_CALLS:
        at = np.flatnonzero(categories.mask_events(events, kinds)[work])
        launches = is_call & categories.match_names(events, pattern)
        calls = np.flatnonzero(launches)
        calls = calls[nesting.find_nearest_ancestor(parent, launches, parent[calls]) < 0]
        if not at.size or at.size != calls.size or _count_tracks(events, calls, _TRACK) > 1:
            continue
        if (
            _count_tracks(events, work[at], ["device", "stream"]) == 1
            and (starts[calls] <= starts[work[at]]).all()
        ):
            matches[at] = calls
    return matches


def find_thread_operators(events: pl.DataFrame, calls: np.ndarray) -> np.ndarray:
    """Return the row of the innermost operator around each call in another process, if its own has no operators.

    Ascend's recorder gives the runtime a process of its own, with the numbers of the threads that called it.
    """
    matches = np.full(calls.size, -1, np.int64)
    is_operator = _mask_placed(events, categories.OPERATOR_CATEGORIES)
    operators = np.flatnonzero(is_operator)
    pids = arrays.to_array(events["pid"], -1)
    at = np.flatnonzero(calls >= 0)
    at = at[~arrays.mask_members(pids[calls[at]], pids[operators])]
    at = at[np.argsort(calls[at], kind="stable")]
    if not at.size or not operators.size:
        return matches
    owners = events.select(_TRACK)[operators].unique().filter(pl.col("tid").is_unique())
    points = events.select("tid", "ts")[calls[at]]
    operators = operators[events["tid"][operators].is_in(owners["tid"].implode()).to_numpy()]
    around = _find_innermost(events, points, operators, ["tid"])
    matches[at] = nesting.find_nearest_ancestor(
        arrays.rows_of_ids(events, events["parent"]), is_operator, around
    )
    return matches


def _mask_placed(events: pl.DataFrame, kinds: Collection[str]) -> np.ndarray:
    mask: np.ndarray = categories.mask_events(events, kinds) & arrays.is_present(events["depth"])
    return mask


def _count_tracks(events: pl.DataFrame, rows: np.ndarray, columns: list[str]) -> int:
    return events.select(columns)[rows].unique().height
