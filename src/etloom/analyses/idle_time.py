"""Idle time of each stream by cause (waiting for the host, for earlier kernels, other), per step and in total.

A gap is the time on a stream between the end of all earlier activities and the start of the next one. It belongs to the
activity after it, and to the step in which that was launched. Its cause:

- host_wait: the call that launched the next activity began after the stream had become idle
- kernel_wait: the gap is shorter than consecutive_kernel_delay, and the activity was launched in time or its launch was
  not recorded
- other: a longer gap before such an activity (a wait for another stream or for resources)

One row per stream and cause, for each step and (null step) in total. busy_ns is the time in which the stream ran, and
busy + the idle time of all causes = span_ns: in total, from the first start to the last end; per step, including the
gap before its first activity. idle_pct is the share of the stream's idle time, span_pct of its span; null if that is 0.

Units: ns (mean, median and std rounded to integers; std of a sample), percent. Definition: HolisticTraceAnalysis
get_idle_time_breakdown, whose gaps are negative if activities of one stream overlap, and which documents its delay as
ns but uses us.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import polars as pl

from etloom.analyses.helpers import Step, check_step, conform_columns
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core.arrays import take_rows
from etloom.core.nesting import group_by_track, order_by_track
from etloom.core.trace import Trace
from etloom.timeline.activity import encode_streams, select_launched_array

SCOPE = "rank"
COLUMNS = {
    "step": pl.Int64,
    "device": pl.Int64,
    "stream": pl.Int64,
    "cause": pl.String,
    "gaps": pl.Int64,
    "idle_ns": pl.Int64,
    "idle_pct": pl.Float64,
    "span_pct": pl.Float64,
    "busy_ns": pl.Int64,
    "span_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "std_ns": pl.Int64,
    "min_ns": pl.Int64,
    "median_ns": pl.Int64,
    "max_ns": pl.Int64,
}
_CAUSES = pl.Series("cause", ["host_wait", "kernel_wait", "other"])
_MISSING = np.iinfo(np.int64).min
_TOTAL = np.iinfo(np.int64).max
"""Stands for the total in place of a step; sorts after all steps."""


def analyze(
    trace: Trace,
    *,
    consecutive_kernel_delay: Annotated[
        int, "Gaps shorter than this (in ns) are normal between kernels that were launched in time."
    ] = 30_000,
    step: Step = None,
) -> pl.DataFrame:
    work = select_launched_work(trace, "device", "stream", "ts", "dur")
    check_step(trace, step)
    track = encode_streams(trace)
    gap, busy, before = _find_gaps(work, track)
    late = select_launched_array(trace, "launch_ts", _MISSING) > before
    cause = np.where(late, 0, np.where(gap < consecutive_kernel_delay, 1, 2))

    # Each activity counts in its step and in the total. A group is a stream in a step or in the total.
    steps = select_launched_array(trace, "step", _TOTAL)
    step_numbers = np.unique(
        np.append(steps[np.diff(steps, prepend=_TOTAL) != 0], _TOTAL)
    )  # equal steps are adjacent
    by_length = np.argsort(gap, kind="stable")  # sorts the gaps of each group by length
    row = by_length[steps[by_length] != _TOTAL if step is None else steps[by_length] == step]
    step_index = np.searchsorted(step_numbers, steps[row])
    if step is None:
        step_index = np.append(step_index, np.full(by_length.size, step_numbers.size - 1))
        row = np.append(row, by_length)
    track_count = int(track.max()) + 1
    group = step_index * track_count + track[row]

    example_row, busy_per_group = (
        np.full(step_numbers.size * track_count, -1),
        np.zeros(step_numbers.size * track_count, np.int64),
    )
    example_row[group] = row
    np.add.at(busy_per_group, group, busy[row])
    groups = np.flatnonzero(example_row >= 0)
    stream, cause_index = np.repeat(groups, 3), np.tile(np.arange(3), groups.size)
    is_gap = gap[row] > 0
    count, idle, stats = _compute_stats(
        (3 * group + cause[row])[is_gap], gap[row[is_gap]], 3 * stream + cause_index
    )
    total_idle, ran = np.repeat(idle.reshape(-1, 3).sum(axis=1), 3), busy_per_group[stream]
    number = pl.Series([*step_numbers[:-1].tolist(), None], dtype=pl.Int64)
    table = {
        "step": number[stream // track_count],
        **{name: work[name][example_row[stream]] for name in ("device", "stream")},
        "cause": _CAUSES[cause_index],
        "gaps": count,
        "idle_ns": idle,
        "idle_pct": _percent(idle, total_idle),
        "span_pct": _percent(idle, total_idle + ran),
        "busy_ns": ran,
        "span_ns": total_idle + ran,
        **stats,
    }
    return conform_columns(table, COLUMNS)


def _percent(part: np.ndarray, total: np.ndarray) -> pl.Series:
    """Return 100 part / total, null where the total is 0."""
    share = np.divide(100 * part, total, out=np.full(part.size, np.nan), where=total > 0)
    return pl.Series(share, nan_to_null=True)


def _compute_stats(
    group: np.ndarray, gap: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, pl.Series]]:
    """Return count, sum and statistics (see COLUMNS) of the idle gaps of each group.

    Args:
        group: Group of each gap. Gaps are sorted by length.
        gap: Length of each gap, ns.
        groups: The groups to return, ascending; they include all groups that have gaps.
    """
    gap = gap[order_by_track(group)]
    count = np.bincount(group, minlength=int(groups.max(initial=-1)) + 1)[groups]
    nonempty = np.flatnonzero(count)
    n = count[nonempty]
    first = np.cumsum(n) - n
    total = np.add.reduceat(gap, first)
    mean = total / n
    squares = np.add.reduceat((gap - np.repeat(mean, n)) ** 2, first)
    idle, stat_row = np.zeros(groups.size, np.int64), np.full(groups.size, -1)
    idle[nonempty], stat_row[nonempty] = total, np.arange(nonempty.size)
    stats = {
        "mean_ns": (np.rint(mean), stat_row),
        "std_ns": (np.rint(np.sqrt(squares / np.maximum(n - 1, 1))), np.where(count < 2, -1, stat_row)),
        "min_ns": (gap[first], stat_row),
        "median_ns": (np.rint((gap[first + (n - 1) // 2] + gap[first + n // 2]) / 2), stat_row),
        "max_ns": (gap[first + n - 1], stat_row),
    }
    return count, idle, {name: take_rows(pl.Series(values), rows) for name, (values, rows) in stats.items()}


def _find_gaps(work: pl.DataFrame, track: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each GPU activity, the gap before it, the busy time it adds, and the end of earlier work on its
    stream (ns).

    Returns:
        The gap before it on its stream, the time it adds to the stream's busy time, and the end of all earlier
        activities there (its own start for the first).
    """
    start = work["ts"].to_numpy()
    end = start + work["dur"].to_numpy()
    before = start.copy()
    for rows in group_by_track(track):
        before[rows[1:]] = np.maximum.accumulate(end[rows])[:-1]
    return np.maximum(start - before, 0), np.maximum(end - np.maximum(before, start), 0), before
