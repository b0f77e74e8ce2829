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

from etloom.analyses._activity import answer, check_step, percent
from etloom.analyses._launched import launched
from etloom.stacks import grouped, lane_codes, numbers
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
_STREAM = ["step", "device", "stream"]
_CAUSE = pl.Series(
    ["host_wait", "kernel_wait", "other"], dtype=pl.Enum(["host_wait", "kernel_wait", "other"])
)


def analyze(trace: Trace, *, consecutive_kernel_delay: int = 30_000, step: int | None = None) -> pl.DataFrame:
    work = launched(trace, *_STREAM, "ts", "dur", "launch_ts")
    check_step(trace, step)
    gap, busy, before = _gaps(work)
    late = numbers(work["launch_ts"], np.iinfo(np.int64).min) > before
    cause = np.where(late, 0, np.where(gap < consecutive_kernel_delay, 1, 2))
    work = work.select(*_STREAM, gap=pl.Series(gap), busy=pl.Series(busy), cause=_CAUSE[cause])
    whole = work.with_columns(pl.lit(None, dtype=pl.Int64).alias("step"))
    work = work.filter(pl.col("step").is_not_null())
    chosen = pl.concat((work, whole)) if step is None else work.filter(pl.col("step") == step)
    dur = pl.col("gap")
    rows = (
        chosen.filter(dur > 0)
        .group_by(*_STREAM, "cause")
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
    streams = chosen.group_by(_STREAM).agg(
        dur.sum().alias("all"),
        pl.col("busy").sum().alias("busy_ns"),
        (dur + pl.col("busy")).sum().alias("span_ns"),
    )
    table = (
        streams.join(_CAUSE.to_frame("cause"), how="cross")
        .join(rows, on=[*_STREAM, "cause"], how="left", nulls_equal=True)
        .with_columns(pl.col("gaps", "idle_ns").fill_null(0))
        .with_columns(
            percent("idle_ns", "all"),
            percent("idle_ns", "span_ns").alias("span_pct"),
        )
    )
    return answer(table, COLUMNS).sort(*_STREAM, "cause", nulls_last=True)


def _gaps(work: pl.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row of work (by ts): the gap before it on its stream, the time it adds to the stream's busy time, and
    the end of all work before it there (its own start for the first)."""
    start = work["ts"].to_numpy()
    end = start + work["dur"].to_numpy()
    before = start.copy()
    lane = lane_codes(work, ("device", "stream"))
    for rows in grouped(lane):
        before[rows[1:]] = np.maximum.accumulate(end[rows])[:-1]
    return np.maximum(start - before, 0), np.maximum(end - np.maximum(before, start), 0), before
