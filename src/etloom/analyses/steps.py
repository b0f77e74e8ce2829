"""Steps of training or iterations of inference: start, duration and device activity of each.

One row per step annotated with ProfilerStep#N on the host, which torch.profiler writes when its step() is called, else
per iteration of an inference engine (see iterations), or per event that --step-name matches; a trace without any has no
result. dur_ns is the duration of the annotation. The device columns cover the GPU
activity launched in the step, whenever it ran: its first start, its last end, and the time in which some of it ran
(concurrent streams are counted once). They are null if the step launched none, for example on a CPU-only trace.

Units: ns. operators and kernels are the number of operators and the number of kernels, memcpys and memsets of the step.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import Step, check_step, explain_unmatched_name, require_linked
from etloom.core import categories
from etloom.core.arrays import group_rows
from etloom.core.errors import AnalysisError
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace
from etloom.timeline.activity import (
    describe_rank,
    explain_missing_times,
    find_steps,
    select_device_events,
)

SCOPE = "rank"
COLUMNS = {
    "step": pl.Int64,
    "start_ns": pl.Int64,
    "dur_ns": pl.Int64,
    "device_start_ns": pl.Int64,
    "device_end_ns": pl.Int64,
    "device_busy_ns": pl.Int64,
    "operators": pl.Int64,
    "kernels": pl.Int64,
}


def analyze(trace: Trace, *, step: Step = None) -> pl.DataFrame:
    require_linked(trace)
    steps_table = find_steps(trace)
    if steps_table.is_empty():
        raise (
            explain_missing_times(trace)
            or explain_unmatched_name(trace)
            or AnalysisError(
                "no step is annotated with ProfilerStep",
                where=describe_rank(trace),
                remedy="call torch.profiler's step() after each step (JAX: StepTraceAnnotation), "
                "or name the events that are steps: --step-name REGEX",
            )
        )
    check_step(trace, step)
    if step is not None:
        steps_table = steps_table.filter(pl.col("step") == step)
    operators = pl.Series(categories.mask_events(trace.events, categories.OPERATOR_CATEGORIES))
    operator_steps = trace.events["step"].filter(operators).drop_nulls().to_numpy()
    numbers, counts = np.unique(operator_steps, return_counts=True)
    operators_by_step = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    activities = _measure_activities(trace)
    rows = []
    for number, start, end in steps_table.select("step", "start", "end").iter_rows():
        *device, kernels = activities.get(number, (None, None, None, 0))
        rows.append((number, start, end - start, *device, operators_by_step.get(number, 0), kernels))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _measure_activities(trace: Trace) -> dict[int, tuple[int | None, int | None, int, int]]:
    """Return the start, end, busy time and number of the GPU activities of each step."""
    work = select_device_events(trace, "step", "ts", "dur").drop_nulls("step")
    steps, starts, durations = (work[name].to_numpy() for name in ("step", "ts", "dur"))
    measures = {}
    for rows in group_rows(steps):
        busy = Intervals.of(starts[rows], starts[rows] + durations[rows])
        measures[int(steps[rows[0]])] = (*(busy.span or (None, None)), busy.total, rows.size)
    return measures
