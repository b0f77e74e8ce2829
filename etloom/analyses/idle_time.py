"""Why each stream was idle: it waited for the host, for the work before it, or for something else; by step and in all.

A gap is the time on a stream between the end of all earlier work and the start of the next; it belongs to the work
that ends it, and with that to the step in which that was launched. Its cause:

- host_wait: the call that launched the next work began after the stream had run dry
- kernel_wait: the gap is shorter than consecutive_kernel_delay, and the work was launched in time or the trace does not
  hold its launch
- other: a longer gap of such work (a wait for another stream or for resources)

A row is a stream and a cause, in a step or (null step) in all. busy_ns is the time in
which the stream ran, and busy + the idle of all causes = span_ns: of the whole, from its first start to its last end;
of a step, the gap before its first work included. idle_pct is of the stream's idle time, span_pct of its span; null
where that is 0.

consecutive_kernel_delay: gaps below this many ns are the usual ones between kernels launched in time.

step: only the rows of this step.

Units: ns (mean, median and std rounded to whole ones; std of a sample), percent. Definition: HolisticTraceAnalysis
get_idle_time_breakdown, whose gaps turn negative where the work of one stream overlaps, and which documents its
delay as ns where it takes us.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.activity import launched_numbers, streams
from etloom.analyses._activity import answer, check_step, percent
from etloom.analyses._launched import launched
from etloom.stacks import grouped, taken
from etloom.trace import Trace

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
    work = launched(trace, "device", "stream", "ts", "dur")
    check_step(trace, step)
    lane = streams(trace)
    gap, busy, before = _gaps(work, lane)
    late = launched_numbers(trace, "launch_ts", _LEAST) > before
    cause = np.where(late, 0, np.where(gap < consecutive_kernel_delay, 1, 2))

    # All work counts in its step and once more in all. A place is a stream in a step or in all.
    steps = launched_numbers(trace, "step", _IN_ALL)
    known = np.unique(np.append(steps[np.diff(steps, prepend=_IN_ALL) != 0], _IN_ALL))  # steps come in runs
    row = np.flatnonzero(steps != _IN_ALL if step is None else steps == step)
    of_step = np.searchsorted(known, steps[row])
    if step is None:
        of_step = np.append(of_step, np.full(steps.size, known.size - 1))
        row = np.append(row, np.arange(steps.size))
    lanes = int(lane.max()) + 1
    place = of_step * lanes + lane[row]
    gap, busy, cause = gap[row], busy[row], cause[row]

    size = known.size * lanes
    one = np.full(size, -1)
    one[place] = row
    there = np.flatnonzero(one >= 0)
    idle, ran = _sums(place, gap, size)[there], _sums(place, busy, size)[there]
    numbered = pl.Series([*known[:-1].tolist(), None], dtype=pl.Int64)
    places = pl.DataFrame(
        {
            "step": numbered[there // lanes],
            **{name: work[name][one[there]] for name in ("device", "stream")},
            "all": idle,
            "busy_ns": ran,
            "span_ns": idle + ran,
        }
    )
    of_cause = np.tile(np.arange(3), there.size)
    gaps = _idle(3 * place + cause, gap, 3 * np.repeat(there, 3) + of_cause)
    table = places[np.repeat(np.arange(there.size), 3)].hstack([_CAUSES[of_cause], *gaps])
    table = table.with_columns(pl.col("gaps", "idle_ns").fill_null(0)).with_columns(
        percent("idle_ns", "all"), percent("idle_ns", "span_ns").alias("span_pct")
    )
    return answer(table, COLUMNS)


def _sums(place: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """The sum of the values at each of so many places."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, place, values)
    return sums


def _idle(place: np.ndarray, gap: np.ndarray, wanted: np.ndarray) -> pl.DataFrame:
    """What COLUMNS say of the gaps at each wanted place, null where there are none."""
    dur, some = pl.col("gap"), gap > 0
    found = (
        pl.DataFrame({"place": place[some], "gap": gap[some]})
        .group_by("place")
        .agg(
            pl.len().alias("gaps"),
            dur.sum().alias("idle_ns"),
            dur.mean().round().alias("mean_ns"),
            dur.std().round().alias("std_ns"),
            dur.min().alias("min_ns"),
            dur.median().round().alias("median_ns"),
            dur.max().alias("max_ns"),
        )
    )
    at = np.full(int(wanted.max(initial=-1)) + 1, -1)
    at[found["place"]] = np.arange(found.height)
    return taken(found, at[wanted])


def _gaps(work: pl.DataFrame, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row of work (by ts): the gap before it on its stream, the time it adds to the stream's busy time, and
    the end of all work before it there (its own start for the first)."""
    start = work["ts"].to_numpy()
    end = start + work["dur"].to_numpy()
    before = start.copy()
    for rows in grouped(lane):
        before[rows[1:]] = np.maximum.accumulate(end[rows])[:-1]
    return np.maximum(start - before, 0), np.maximum(end - np.maximum(before, start), 0), before
