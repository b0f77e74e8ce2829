"""Communication time that overlaps computation and time that is exposed, per step and in total.

communication_ns: time in which at least one communication runs, on any stream. overlapped_ns: the part in which
computation runs too. exposed_ns: the rest. overlap_pct = 100 overlapped / communication; null if there is no
communication. One row per step (the time between the start and the end of its ProfilerStep) and one with a null step
for the whole trace. ``basis``: device, or host if the trace has no GPU activity (see temporal-breakdown).

Units: ns, percent. Definition: HolisticTraceAnalysis get_comm_comp_overlap, CCL-Bench
compute_comm_overlap.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import Step, conform_columns, percent, step_windows
from etloom.core.trace import Trace
from etloom.timeline.activity import compute_activity

SCOPE = "rank"
COLUMNS = {
    "step": pl.Int64,
    "basis": pl.String,
    "communication_ns": pl.Int64,
    "overlapped_ns": pl.Int64,
    "exposed_ns": pl.Int64,
    "overlap_pct": pl.Float64,
}


def analyze(trace: Trace, *, step: Step = None) -> pl.DataFrame:
    work = compute_activity(trace)
    communication, computation = work.times["communication"], work.times["computation"]
    rows = step_windows(trace, work.busy, step)
    bounds = rows["start"].to_numpy(), rows["end"].to_numpy()
    table = rows.with_columns(
        pl.lit(work.basis).alias("basis"),
        pl.Series("communication_ns", communication.covered(*bounds)),
        pl.Series("overlapped_ns", (communication & computation).covered(*bounds)),
        pl.Series("exposed_ns", (communication - computation).covered(*bounds)),
    ).with_columns(percent("overlapped_ns", "communication_ns").alias("overlap_pct"))
    return conform_columns(table, COLUMNS)
