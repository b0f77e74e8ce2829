"""Times of operators: self time, runtime calls, and the device time they launch."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import rows_of_ids, take_rows, to_array
from etloom.core.nesting import compute_exclusive_time, find_nearest_ancestor
from etloom.core.trace import Trace

Rows = NDArray[np.int64]
_REPLAYED_SCHEMA = {
    "id": pl.UInt32,
    "name": pl.Categorical,
    "step": pl.Int64,
    "device_ns": pl.Int64,
    "outermost": pl.Boolean,
}
MAX_KEPT_EVENTS = 1_000_000
"""Times of the operators of a larger trace take too much memory to be kept between analyses."""


def add_self_time(trace: Trace, events: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``self_ns`` to host events: their duration without directly nested host events of any category."""
    self_time = compute_exclusive_time(trace.events)
    return events.with_columns(self_time[rows_of_ids(trace.events, events["id"])].alias("self_ns"))


def measure_operators(trace: Trace) -> pl.DataFrame:
    """Return the times of each operator that has a duration.

    Returns:
        - id, name, step, dur, self_ns
        - runtime_ns: time in device runtime or driver calls of which it is the innermost operator; null if none were
          recorded
        - exclusive_ns: self_ns + runtime_ns
        - device_ns: sum of the durations of the GPU activities launched in it or its callees
        - outermost: no operator of the same name encloses it, so that sums over outermost ones count no time twice
    """
    is_kept = trace.rows("events") <= MAX_KEPT_EVENTS
    return trace.compute_once(_measure_operators) if is_kept else _measure_operators(trace)


def _measure_operators(trace: Trace) -> pl.DataFrame:
    events = trace.events
    is_operator = pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)) & pl.col("dur").is_not_null()
    parent = rows_of_ids(events, events["parent"])
    names = to_array(events["name"].to_physical(), -1)
    rows = np.flatnonzero(events.select(is_operator.fill_null(False)).to_series().to_numpy())
    self_time = compute_exclusive_time(events)
    runtime = sum_runtime_time(events, self_time, parent, rows)
    return events.select("id", "name", "step", "dur")[rows].with_columns(
        self_time[rows].alias("self_ns"),
        runtime.alias("runtime_ns"),
        (self_time[rows] + runtime.fill_null(0)).alias("exclusive_ns"),
        pl.Series("device_ns", sum_device_time(trace, parent)[rows]),
        pl.Series("outermost", ~_is_enclosed_by_namesake(rows, parent, names)),
    )


def measure_replayed_operators(trace: Trace) -> pl.DataFrame:
    """Return the captured operators of each replay of a device graph, which take no time on the host.

    Returns:
        - id, name of the captured operator, step of the launch
        - device_ns: sum of the durations of the GPU activities launched by it or its callees
        - outermost: no operator of the same name encloses it
    """
    events = trace.events
    captured = trace.launches["captured"]
    if captured.null_count() == len(captured):
        return pl.DataFrame(schema=_REPLAYED_SCHEMA)
    pairs = trace.launches.filter(captured.is_not_null())
    parent = rows_of_ids(events, events["parent"])
    operators = categories.mask_events(events, (categories.CAPTURED_OPERATOR,))
    launch = rows_of_ids(events, pairs["launch"])
    above = rows_of_ids(events, pairs["operator"])
    time = to_array(take_rows(events["dur"], rows_of_ids(events, pairs["device_event"])), 0)
    levels = []
    while (inside := (above >= 0) & operators[above]).any():
        launch, above, time = launch[inside], above[inside], time[inside]
        levels.append(pl.DataFrame({"row": above, "launch": launch, "device_ns": time}))
        above = find_nearest_ancestor(parent, operators, parent[above])
    empty = pl.DataFrame(schema={"row": pl.Int64, "launch": pl.Int64, "device_ns": pl.Int64})
    calls = (
        pl.concat([empty, *levels])
        .group_by("row", "launch", maintain_order=True)
        .agg(pl.col("device_ns").sum())
    )
    rows = calls["row"].to_numpy()
    names = to_array(events["name"].to_physical(), -1)
    distinct, index = np.unique(rows, return_inverse=True)
    return events.select("id", "name")[rows].with_columns(
        take_rows(events["step"], calls["launch"].to_numpy()).alias("step"),
        calls["device_ns"],
        pl.Series("outermost", ~_is_enclosed_by_namesake(distinct, parent, names)[index]),
    )


def sum_runtime_time(events: pl.DataFrame, exclusive: pl.Series, parent: Rows, operators: Rows) -> pl.Series:
    """Return the total time (ns) of the runtime calls directly inside each operator; all null if no call was recorded.

    A call nested in another (a runtime's into its driver) is counted once, because each call contributes its
    exclusive time (``own``).
    """
    calls = np.flatnonzero(
        categories.mask_events(events, categories.RUNTIME_CATEGORIES) & exclusive.is_not_null().to_numpy()
    )
    if not calls.size:
        return pl.Series([None], dtype=pl.Int64).new_from_index(0, operators.size)
    is_operator = np.zeros(events.height, dtype=np.bool_)
    is_operator[operators] = True
    around = find_nearest_ancestor(parent, is_operator, calls)
    total = np.zeros(events.height, dtype=np.int64)
    np.add.at(total, around[around >= 0], exclusive[calls].to_numpy()[around >= 0])
    return pl.Series(total[operators])


def sum_device_time(trace: Trace, parent: Rows) -> NDArray[np.int64]:
    """Return, for each event, the total duration (ns) of the GPU activities launched inside the event at any depth."""
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
    """Return a mask of the events ``rows`` that an event of the same name encloses; climbs all call stacks at once."""
    enclosed = np.zeros(rows.size, dtype=np.bool_)
    climbing = np.arange(rows.size)
    above = parent[rows]
    while climbing.size:
        climbing, above = climbing[above >= 0], above[above >= 0]
        same = names[above] == names[rows[climbing]]
        enclosed[climbing[same]] = True
        climbing, above = climbing[~same], parent[above[~same]]
    return enclosed
