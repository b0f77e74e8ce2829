"""Times without activity on any stream of a rank, and their causes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import take_rows, to_array
from etloom.core.intervals import Intervals, union
from etloom.core.schema import TIME_LIMIT

if TYPE_CHECKING:
    from etloom.analyses.findings.rank_view import RankView

CAUSES = (
    *("data", "save", "compile", "profiler", "compute", "allocator", "copy", "sync", "pause", "call"),
    *("launch", "device"),
)
"""Causes of a gap between activities.

The host was loading data, saving a checkpoint, compiling, held up by the profiler, computing itself (operators that
launch nothing), allocating device memory, returned from a copy out of pageable memory, or from another call that
synchronizes, after the device had become idle, ran no
operator for `LONG_PAUSE_NS` or more within an annotated step, was in one call of the runtime for that long, or launched
late (or nothing more) for another reason; or
the work was launched in time and the device started it late (the stream waited, or launch delay).

A late launch explains a gap only until its call returned, and the usual launch latency thereafter: a longer rest is a
gap of its own, of the device.

A stall of the host may take more time than the gap that it causes, because the device still had queued work. Launches
after it are then late because of the stall, until they add up to the time that this work covered. While the device only
communicates, perhaps because another rank is late, the host loses nothing.
"""
LONG_PAUSE_NS = 1_000_000
"""Python needs less between two operators of a loop."""
MIN_COMPUTE_NS = 50_000
"""An operator that launches nothing and takes this long itself computes on the host; others only prepare launches."""
PAGEABLE = r"(?i)(?:HtoD|HostToDevice).*pageable"
"""Matches copies from pageable memory to the device, which block the host."""
_LAUNCH_LATENCY_NS = 50_000
"""Longest time from the return of a launch to the start of the activity that counts as part of launching, in ns: about
5 us on an idle device, several times that for large graphs and with a profiler."""
_SYNC_RETURN_NS = 5_000
"""A synchronizing call returns slightly later than the work it waited for, in ns."""
_GAP_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "start": pl.Int64,
    "end": pl.Int64,
    "gap_ns": pl.Int64,
    "cause": pl.Enum(CAUSES),
    "is_late_effect": pl.Boolean,
    "event": pl.Int64,
    "step": pl.Int64,
    "stream": pl.Int64,
    "name": pl.Categorical,
}


def find_gaps(view: RankView) -> pl.DataFrame:
    """Return the times without activity on any stream within the window of a rank.

    Returns:
        start, end, gap_ns, cause (`CAUSES`), is_late_effect (the stall that caused it was over before it began), event
        (the responsible host call: the one that waited, or that launched the activity after the gap), and the step,
        stream and name of that activity; null after the last activity.
    """
    if view.activity.basis != "device" or view.window is None:
        return pl.DataFrame(schema=_GAP_SCHEMA)
    idle = view.busy.gaps(*view.window)
    starts, ends = idle.starts, idle.ends
    after = _find_next_activities(view, ends)
    called = to_array(after["launch_ts"], 0)
    has_launch = after["launch"].is_not_null().to_numpy()
    # The host is late if its call began after the device had become idle, or if no activity follows.
    is_last = ends > view.busy.starts[-1]
    late = (has_launch & (called > starts)) | is_last
    until = np.where(is_last, ends, np.where(late, called, starts))
    stalls = list_stalls(view)
    cause, responsible = _attribute_gaps(view, stalls, starts, until, late, is_last)
    responsible = np.where(responsible < 0, to_array(after["launch"], -1).astype(np.int64), responsible)
    columns = {
        "start": starts,
        "end": ends,
        "cause": pl.Series(CAUSES, dtype=pl.Enum(CAUSES))[cause],
        "event": pl.Series(responsible).set(pl.Series(responsible == -1), None),
        **{name: after[name] for name in ("launch", "launch_end", "step", "stream", "name")},
    }
    explained = pl.Series(late & ~is_last)
    stalls["sync"] = Intervals.of(view.sync_calls["ts"], view.sync_calls["end"])
    exposed = view.activity.times["communication"] - view.activity.times["computation"]
    columns["stall_ns"], columns["stall"] = _measure_stalls(
        {name: times - exposed for name, times in stalls.items()}, late & ~is_last, until
    )
    gaps = _split_after_launch(pl.DataFrame(columns), explained)
    gaps = _extend_stalls(gaps.with_columns(gap_ns=pl.col("end") - pl.col("start")))
    return gaps.select(pl.col(name).cast(dtype) for name, dtype in _GAP_SCHEMA.items())


def list_stalls(view: RankView) -> dict[str, Intervals]:
    """Return the times at which something other than the device blocks the host, by cause."""
    stalls = {
        "data": view.data_loading,
        "save": view.saving
        - (view.busy - view.busy_computing),  # its copies are no work that was queued before
        "compile": view.compiling,
        "profiler": view.profiling,
        "compute": view.host_computing,
        "allocator": view.allocating,
    }
    # No operator runs in many of these either: a pause is what they do not explain.
    return {**stalls, "pause": view.pausing - union(stalls.values()), "call": view.long_calling}


def _attribute_gaps(
    view: RankView,
    stalls: Mapping[str, Intervals],
    starts: NDArray[np.int64],
    until: NDArray[np.int64],
    late: NDArray[np.bool_],
    is_last: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the cause of each gap (its index in `CAUSES`), and the id of the responsible call, -1 for the launch.

    Args:
        stalls: The result of `list_stalls`.
        starts: Start of each gap.
        until: The start of the late launch that ends the gap; of a gap without one, its own start.
        late: True if a late launch ends the gap, or no activity follows.
        is_last: True if nothing ends it.
    """
    half = np.maximum(until - starts, 1)
    wait = _find_last_before(view.sync_calls, until)
    released = _take(view.sync_calls["end"], wait)
    is_synced = (wait >= 0) & (released >= starts - _SYNC_RETURN_NS)
    # Before the first activity there is nothing to wait for; after the last one, the host launches nothing more.
    is_synced &= (starts >= view.busy.starts[0]) & ~is_last
    allocation = _find_last_before(view.allocations, until)
    holds = {name: times.covered(starts, until) * 2 > half for name, times in stalls.items()}
    holds["allocator"] &= (allocation >= 0) & (_take(view.allocations["end"], allocation) > starts)
    holds["copy"] = is_synced & np.isin(_take(view.sync_calls["id"], wait), _find_pageable_waits(view))
    holds["sync"] = is_synced
    holds["pause"] &= ~is_last
    conditions = [late & holds[name] for name in CAUSES[: len(holds)]]
    cause = np.select([*conditions, late], range(len(conditions) + 1), CAUSES.index("device"))
    responsible = np.full(len(starts), -1)
    for name, calls, rows in (
        ("copy", view.sync_calls, wait),
        ("sync", view.sync_calls, wait),
        ("allocator", view.allocations, allocation),
    ):
        is_cause = cause == CAUSES.index(name)
        responsible[is_cause] = _take(calls["id"], rows)[is_cause]
    return cause, responsible


def _find_pageable_waits(view: RankView) -> NDArray[np.int64]:
    """Return the calls (ids) that wait for a copy from pageable memory: the copy, or another of its operator."""
    copies = view.activities.filter(view.match_activities(view.activities, PAGEABLE))["launch"].drop_nulls()
    operators = view.parents[view.find_rows(copies)]
    operators = operators[operators >= 0]
    operators = operators[view.match_categories(categories.OPERATOR_CATEGORIES)[operators]]
    calls = view.sync_calls["id"]
    same_operator = calls.filter(pl.Series(np.isin(view.parents[view.find_rows(calls)], operators)))
    return np.concatenate([copies.to_numpy(), same_operator.to_numpy()]).astype(np.int64)


def _split_after_launch(gaps: pl.DataFrame, explained: pl.Series) -> pl.DataFrame:
    """Split each gap that lasts beyond the late launch that explains its begin; return all gaps, ordered by
    start.

    Args:
        gaps: start, end, cause, event; launch, the call of the activity after the gap, and launch_end, its return.
        explained: The gaps that a late launch ends.
    """
    launched = pl.col("launch_end")
    is_split = explained & gaps.select(pl.col("end") - launched > _LAUNCH_LATENCY_NS).to_series().fill_null(
        False
    )
    rest = gaps.filter(is_split).with_columns(
        start=launched,
        event="launch",
        cause=pl.lit("device", gaps.schema["cause"]),
        stall_ns=pl.lit(0, pl.Int64),
        stall=pl.lit(CAUSES.index("launch"), pl.Int64),
    )
    before = gaps.with_columns(end=pl.when(is_split).then(launched).otherwise("end"))
    return pl.concat([before, rest], how="vertical_relaxed").sort("start", maintain_order=True)


def _measure_stalls(
    stalls: dict[str, Intervals], late: NDArray[np.bool_], until: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how long (ns) the host stalled after the late launch that ended the previous gap, and the
    longest cause."""
    stall_ns, stall = np.zeros(len(until), np.int64), np.full(len(until), CAUSES.index("launch"))
    if late.any():
        ends = np.maximum.accumulate(until[late])
        since = np.concatenate(([-TIME_LIMIT], ends[:-1]))
        covered = np.array([times.covered(since, ends) for times in stalls.values()])
        stall_ns[late] = union(stalls.values()).covered(since, ends)
        stall[late] = np.array([CAUSES.index(name) for name in stalls])[covered.argmax(axis=0)]
    return stall_ns, stall


def _extend_stalls(gaps: pl.DataFrame) -> pl.DataFrame:
    """Attribute late launches to the preceding stall, until their gaps add up to the part of it that no gap
    shows."""
    cause = gaps["cause"].to_physical().to_numpy().astype(np.int64)
    gap, stall_ns = gaps["gap_ns"].to_numpy(), gaps["stall_ns"].to_numpy()
    event = gaps["event"].fill_null(-1).to_numpy().astype(np.int64)
    launch = CAUSES.index("launch")
    # The device may have had work during all of a stall: then no gap is its own.
    is_hidden = (cause == launch) & (2 * stall_ns > gap)
    cause[is_hidden] = gaps["stall"].to_numpy()[is_hidden]
    is_late_effect = is_hidden.copy()
    places = np.flatnonzero(cause < launch)
    rest, previous = 0, -1
    for i, place in enumerate(places.tolist()):
        rest = max(0, (rest if cause[place] == previous else 0) + int(stall_ns[place] - gap[place]))
        previous = cause[place]
        end = int(places[i + 1]) if i + 1 < len(places) else len(gap)
        rows = place + 1 + np.flatnonzero(cause[place + 1 : end] == launch)
        before = np.cumsum(gap[rows]) - gap[rows]
        due = rows[before < rest]
        cause[due], event[due], is_late_effect[due] = cause[place], event[place], True
        rest = max(0, rest - int(gap[rows].sum()))
    return gaps.with_columns(
        cause=pl.Series(CAUSES, dtype=pl.Enum(CAUSES))[cause],
        is_late_effect=pl.Series(is_late_effect),
        event=pl.Series(event).set(pl.Series(event == -1), None),
    )


def _find_next_activities(view: RankView, times: NDArray[np.int64]) -> pl.DataFrame:
    """Return the first activity at or after each time, null for none.

    Columns: launch, launch_ts, launch_end, step, stream, name.
    """
    work = view.activities.select("launch", "launch_ts", "launch_end", "step", "stream", "name")
    following = np.searchsorted(view.activities["ts"].to_numpy(), times)
    return take_rows(work, np.where(following == work.height, -1, following))


def _find_last_before(calls: pl.DataFrame, until: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the call (by end) that ended last before each time, -1 for none."""
    return np.searchsorted(calls["end"].to_numpy(), until, side="right") - 1


def _take(column: pl.Series, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the values of these rows; the value for row -1 is arbitrary."""
    return column.to_numpy().astype(np.int64)[rows] if len(column) else np.zeros(len(rows), np.int64)
