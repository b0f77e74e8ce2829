"""Time breakdown: computation, exposed communication, exposed memcpy, idle; per step and in total.

One row per step (from the start to the end of its ProfilerStep, whatever ran on the device in that time), and one with
a null step from the start of the first to the end of the last activity. Concurrent activities on several streams are
counted once, as the first that applies:

- compute: some computation runs
- exposed_communication: communication runs and no computation
- exposed_memory: a memcpy or memset runs, and neither of the two
- exposed_other: only other activities run
- idle: nothing runs

so that compute + exposed_communication + exposed_memory + exposed_other + idle = span, and busy is their
sum without idle. ``basis``: device, or host if the trace has no GPU activity. With basis host the breakdown covers the
operators on the host (communication: in a c10d:: call or a gloo: range on any thread; compute: in another operator on
some thread; idle: outside of operators, which is Python or waiting).

Where the device runs far behind the host, as in inference, the work that a step launched lies after the end of its
ProfilerStep, and the row of the step is idle: `etloom analyze iterations` measures the device time of each iteration.

Units: ns; percent of span. Definitions: HolisticTraceAnalysis get_temporal_breakdown (its non-compute
time is busy - compute), TraceLens gpu_timeline (its parts), CCL-Bench (steps). Unlike in HTA,
synchronization is not counted as activity.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import Step, conform_columns, percent, step_windows
from etloom.core.trace import Trace
from etloom.timeline.activity import compute_activity

SCOPE = "rank"
_PARTS = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "exposed_other_ns", "idle_ns")
COLUMNS = {
    "step": pl.Int64,
    "basis": pl.String,
    "start_ns": pl.Int64,
    "span_ns": pl.Int64,
    "busy_ns": pl.Int64,
    **dict.fromkeys(_PARTS, pl.Int64),
    **{part.replace("_ns", "_pct"): pl.Float64 for part in _PARTS},
}


def analyze(trace: Trace, *, step: Step = None) -> pl.DataFrame:
    return trace.compute_once(measure_parts, step)


def measure_parts(trace: Trace, step: int | None) -> pl.DataFrame:
    """Return the time breakdown of a rank (`COLUMNS`): a row per step, and a row for the whole active time."""
    work = compute_activity(trace)
    busy = work.busy
    rows = step_windows(trace, busy, step)
    bounds = rows["start"].to_numpy(), rows["end"].to_numpy()
    so_far, parts = work.times["computation"], [work.times["computation"].covered(*bounds)]
    for kind in ("communication", "memory", "other"):
        parts.append((work.times[kind] - so_far).covered(*bounds))
        so_far |= work.times[kind]
    covered = busy.covered(*bounds)
    span = bounds[1] - bounds[0]
    table = rows.with_columns(
        pl.lit(work.basis).alias("basis"),
        pl.col("start").alias("start_ns"),
        pl.Series("span_ns", span),
        pl.Series("busy_ns", covered),
        *(pl.Series(name, part) for name, part in zip(_PARTS, (*parts, span - covered), strict=True)),
    ).with_columns(percent(part, "span_ns") for part in _PARTS)
    return conform_columns(table, COLUMNS)
