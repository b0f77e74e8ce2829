"""Concurrency of kernel types: which types of GPU activity run at the same time, and for how long.

One row per combination of types (computation, communication, memory, other): the time in which activities of exactly
these types run, on any streams. The rows are disjoint and add up to the busy time; combinations that never occur have
no row. pct is relative to the busy time. ``basis``: device, or host if the trace has no GPU activity (see
temporal-breakdown).

Units: ns, percent. Definition: the first table of HolisticTraceAnalysis get_gpu_kernel_breakdown, "A
overlapping B", which omits other activities and sums over ranks.
"""

from __future__ import annotations

from itertools import combinations
from typing import Annotated

import polars as pl

from etloom.analyses.helpers import conform_columns, percent_of_total, step_windows
from etloom.core.intervals import union
from etloom.core.trace import Trace
from etloom.timeline.activity import compute_activity

SCOPE = "rank"
COLUMNS = {"kinds": pl.String, "basis": pl.String, "time_ns": pl.Int64, "time_pct": pl.Float64}


def analyze(
    trace: Trace,
    *,
    step: Annotated[int | None, "Only the time from the start to the end of this step."] = None,
) -> pl.DataFrame:
    work = compute_activity(trace)
    *_, (_, start, end) = step_windows(trace, work.busy, step).iter_rows()
    times = {kind: time.clip(start, end) for kind, time in work.times.items() if time}
    rows = []
    for count in range(1, len(times) + 1):
        for combination in combinations(times, count):
            together = times[combination[0]]
            for kind in combination[1:]:
                together &= times[kind]
            alone = together - union(time for kind, time in times.items() if kind not in combination)
            rows.append((" + ".join(combination), work.basis, alone.total))
    table = pl.DataFrame(rows, schema=["kinds", "basis", "time_ns"], orient="row").filter(
        pl.col("time_ns") > 0
    )
    return conform_columns(
        table.with_columns(percent_of_total("time_ns")).sort("time_ns", "kinds", descending=[True, False]),
        COLUMNS,
    )
