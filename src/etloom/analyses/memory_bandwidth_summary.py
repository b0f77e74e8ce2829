"""Memcpy and memset totals by direction: count, bytes, time and bandwidth.

mean_gb_per_s is bytes over the time in which such an operation ran; the other bandwidths are of single operations.
Operations without recorded size are excluded from it. small: operations of less than 64 KiB, which are dominated by
their startup cost; null if no size is known.

Units: ns, B, GB/s with GB = 1e9 B. Definition: HolisticTraceAnalysis get_memory_bw_summary, which describes the points
where its time series changes.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import check_step, conform_columns
from etloom.analyses.helpers.memory_transfers import measure_transfers
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace

SCOPE = "rank"
SMALL = 64 << 10
COLUMNS = {
    "name": pl.String,
    "count": pl.Int64,
    "bytes": pl.Int64,
    "time_ns": pl.Int64,
    "busy_ns": pl.Int64,
    "mean_gb_per_s": pl.Float64,
    "median_gb_per_s": pl.Float64,
    "min_gb_per_s": pl.Float64,
    "max_gb_per_s": pl.Float64,
    "small": pl.Int64,
}


def analyze(
    trace: Trace, *, step: Annotated[int | None, "Only operations launched in this step."] = None
) -> pl.DataFrame:
    check_step(trace, step)
    work = measure_transfers(trace)
    work = work if step is None else work.filter(pl.col("step") == step)
    rows = []
    for (name,), group in work.group_by("direction", maintain_order=True):
        busy = Intervals.of(group["ts"], group["end"]).total
        sized = group.drop_nulls("bytes")
        size, small = (sized["bytes"].sum(), (sized["bytes"] < SMALL).sum()) if sized.height else (None, None)
        moving, rate = Intervals.of(sized["ts"], sized["end"]).total, group["gbps"]
        mean = size / moving if size is not None and moving else None
        figures = (mean, rate.median(), rate.min(), rate.max())
        rows.append((name, group.height, size, group["dur"].sum(), busy, *figures, small))
    table = pl.DataFrame(rows, schema=COLUMNS, orient="row").sort("time_ns", "name", descending=(True, False))
    return conform_columns(table, COLUMNS)
