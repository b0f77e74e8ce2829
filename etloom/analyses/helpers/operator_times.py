"""Operators in their nests: self time, and sums over what lies below them."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import (
    compute_exclusive_time,
    find_nearest_ancestor,
    is_in,
    rows_of_ids,
    take_rows,
    to_array,
)
from etloom.core.trace import Trace

Rows = NDArray[np.int64]


def add_self_time(trace: Trace, events: pl.DataFrame) -> pl.DataFrame:
    """events (of the trace's host) with ``self_ns``: dur without the host events directly inside, of any sort."""
    own = compute_exclusive_time(trace.events)
    return events.with_columns(own[rows_of_ids(trace.events, events["id"])].alias("self_ns"))


def measure_operators(trace: Trace) -> pl.DataFrame:
    """id, name, step, dur, self_ns, runtime_ns, exclusive_ns, device_ns, outermost of each operator that has a duration.

    runtime_ns: in calls into the device's runtime or driver of which this is the innermost operator; null where the
    trace holds none. exclusive_ns: self_ns and that. device_ns: the sum of the durations of the device events launched in it
    or anywhere below it. outermost: nothing of the same name encloses it, so that sums over the outermost ones count no
    time twice.
    """
    events = trace.events
    is_operator = pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)) & pl.col("dur").is_not_null()
    parent = rows_of_ids(events, events["parent"])
    names = to_array(events["name"].to_physical(), -1)
    rows = np.flatnonzero(events.select(is_operator.fill_null(False)).to_series().to_numpy())
    own = compute_exclusive_time(events)
    runtime = sum_runtime_time(events, own, parent, rows)
    return events.select("id", "name", "step", "dur")[rows].with_columns(
        own[rows].alias("self_ns"),
        runtime.alias("runtime_ns"),
        (own[rows] + runtime.fill_null(0)).alias("exclusive_ns"),
        pl.Series("device_ns", sum_device_time(trace, parent)[rows]),
        pl.Series("outermost", ~_is_enclosed_by_namesake(rows, parent, names)),
    )


def sum_runtime_time(events: pl.DataFrame, own: pl.Series, parent: Rows, operators: Rows) -> pl.Series:
    """Of each of these rows the time in runtime calls of which it is the innermost operator; all null without calls.

    A call inside a call (a runtime's into its driver) counts once, since each counts what it itself took (``own``).
    """
    calls = np.flatnonzero(is_in(events["cat"], categories.RUNTIME_CATEGORIES) & own.is_not_null().to_numpy())
    if not calls.size:
        return pl.Series([None], dtype=pl.Int64).new_from_index(0, operators.size)
    is_operator = np.zeros(events.height, dtype=np.bool_)
    is_operator[operators] = True
    around = find_nearest_ancestor(parent, is_operator, calls)
    total = np.zeros(events.height, dtype=np.int64)
    np.add.at(total, around[around >= 0], own[calls].to_numpy()[around >= 0])
    return pl.Series(total[operators])


def sum_device_time(trace: Trace, parent: Rows) -> NDArray[np.int64]:
    """The device time launched under each event: what each launches, given to all that enclose it."""
    events, launches = trace.events, trace.launches
    above = rows_of_ids(events, launches["operator"])
    time = to_array(take_rows(events["dur"], rows_of_ids(events, launches["device_event"])), 0)
    total = np.zeros(events.height, dtype=np.int64)
    while above.size:
        above, time = above[above >= 0], time[above >= 0]
        np.add.at(total, above, time)
        above = parent[above]
    return total


def _is_enclosed_by_namesake(rows: Rows, parent: Rows, names: Rows) -> NDArray[np.bool_]:
    """Whether an event further out has the same name, by climbing all nests at once, one level a turn."""
    found = np.zeros(rows.size, dtype=np.bool_)
    climbing = np.arange(rows.size)
    above = parent[rows]
    while climbing.size:
        climbing, above = climbing[above >= 0], above[above >= 0]
        same = names[above] == names[rows[climbing]]
        found[climbing[same]] = True
        climbing, above = climbing[~same], parent[above[~same]]
    return found
