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

consecutive_kernel_delay: gaps shorter than this (in ns) are normal between kernels that were launched in time.

step: only this step.

Units: ns (mean, median and std rounded to integers; std of a sample), percent. Definition: HolisticTraceAnalysis
get_idle_time_breakdown, whose gaps are negative if activities of one stream overlap, and which documents its delay as
ns but uses us.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import check_step, conform_columns
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.core.arrays import group_by_track, sort_by_track, take_rows
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
_LEAST = np.iinfo(np.int64).min
_IN_ALL = np.iinfo(np.int64).max
"""In place of a step, behind all others."""


def analyze(trace: Trace, *, consecutive_kernel_delay: int = 30_000, step: int | None = None) -> pl.DataFrame:
    work = select_launched_work(trace, "device", "stream", "ts", "dur")
    check_step(trace, step)
    lane = encode_streams(trace)
    gap, busy, before = _gaps(work, lane)
    late = select_launched_array(trace, "launch_ts", _LEAST) > before
    cause = np.where(late, 0, np.where(gap < consecutive_kernel_delay, 1, 2))

    # All work counts in its step and once more in all. A place is a stream in a step or in all.
    steps = select_launched_array(trace, "step", _IN_ALL)
    known = np.unique(np.append(steps[np.diff(steps, prepend=_IN_ALL) != 0], _IN_ALL))  # steps come in runs
    every = np.argsort(gap, kind="stable")  # so that the gaps of each place come in order of length
    row = every[steps[every] != _IN_ALL if step is None else steps[every] == step]
    of_step = np.searchsorted(known, steps[row])
    if step is None:
        of_step = np.append(of_step, np.full(every.size, known.size - 1))
        row = np.append(row, every)
    lanes = int(lane.max()) + 1
    place = of_step * lanes + lane[row]

    one, busy_of = np.full(known.size * lanes, -1), np.zeros(known.size * lanes, np.int64)
    one[place] = row
    np.add.at(busy_of, place, busy[row])
    there = np.flatnonzero(one >= 0)
    stream, of_cause = np.repeat(there, 3), np.tile(np.arange(3), there.size)
    some = gap[row] > 0
    count, idle, stats = _stats((3 * place + cause[row])[some], gap[row[some]], 3 * stream + of_cause)
    whole, ran = np.repeat(idle.reshape(-1, 3).sum(axis=1), 3), busy_of[stream]
    number = pl.Series([*known[:-1].tolist(), None], dtype=pl.Int64)
    table = {
        "step": number[stream // lanes],
        **{name: work[name][one[stream]] for name in ("device", "stream")},
        "cause": _CAUSES[of_cause],
        "gaps": count,
        "idle_ns": idle,
        "idle_pct": _percent(idle, whole),
        "span_pct": _percent(idle, whole + ran),
        "busy_ns": ran,
        "span_ns": whole + ran,
        **stats,
    }
    return conform_columns(table, COLUMNS)


def _percent(part: np.ndarray, whole: np.ndarray) -> pl.Series:
    """100 part / whole, null where the whole is 0."""
    share = np.divide(100 * part, whole, out=np.full(part.size, np.nan), where=whole > 0)
    return pl.Series(share, nan_to_null=True)


def _stats(
    place: np.ndarray, gap: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, pl.Series]]:
    """Of the gaps at each wanted place how many there are, their sum, and what else COLUMNS say of them.

    Gaps come in order of their length. wanted: every place that has one, and maybe others, ascending.
    """
    gap = gap[sort_by_track(place)]
    count = np.bincount(place, minlength=int(wanted.max(initial=-1)) + 1)[wanted]
    some = np.flatnonzero(count)
    n = count[some]
    first = np.cumsum(n) - n
    total = np.add.reduceat(gap, first)
    mean = total / n
    squares = np.add.reduceat((gap - np.repeat(mean, n)) ** 2, first)
    idle, at = np.zeros(wanted.size, np.int64), np.full(wanted.size, -1)
    idle[some], at[some] = total, np.arange(some.size)
    stats = {
        "mean_ns": (np.rint(mean), at),
        "std_ns": (np.rint(np.sqrt(squares / np.maximum(n - 1, 1))), np.where(count < 2, -1, at)),
        "min_ns": (gap[first], at),
        "median_ns": (np.rint((gap[first + (n - 1) // 2] + gap[first + n // 2]) / 2), at),
        "max_ns": (gap[first + n - 1], at),
    }
    return count, idle, {name: take_rows(pl.Series(of), rows) for name, (of, rows) in stats.items()}


def _gaps(work: pl.DataFrame, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row of work (by ts): the gap before it on its stream, the time it adds to the stream's busy time, and
    the end of all work before it there (its own start for the first)."""
    start = work["ts"].to_numpy()
    end = start + work["dur"].to_numpy()
    before = start.copy()
    for rows in group_by_track(lane):
        before[rows[1:]] = np.maximum.accumulate(end[rows])[:-1]
    return np.maximum(start - before, 0), np.maximum(end - np.maximum(before, start), 0), before
