"""Memcpy and memset bandwidth over time, by direction; one row per change.

The bandwidths of concurrent operations of one direction add up. Operations without recorded bandwidth or size are
omitted. See memory-bandwidth-summary for totals.

step: only operations launched in this step.

Units: ns on the trace's clock; GB/s with GB = 1e9 B. Definition: HolisticTraceAnalysis get_memory_bw_time_series.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import filter_step
from etloom.analyses.helpers.memory_transfers import measure_transfers
from etloom.analyses.helpers.running_totals import RunningTotals
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
COLUMNS = {"name": pl.String, "ts_ns": pl.Int64, "gb_per_s": pl.Float64}


def analyze(trace: Trace, *, step: int | None = None) -> pl.DataFrame:
    known = measure_transfers(trace).drop_nulls("gbps")
    if not known.height:
        raise AnalysisError(
            "the trace states neither size nor bandwidth of its copies",
            where=describe_rank(trace),
            remedy="memory-bandwidth-summary counts them and says how long they took",
        )
    known = filter_step(trace, known, step)
    # What lasts less than the clock's grain lasts one tick.
    ends = np.maximum(known["end"].to_numpy(), known["ts"].to_numpy() + 1)
    copying = RunningTotals(known["lane"].to_numpy(), known["ts"].to_numpy(), ends)
    total = copying.total(known["gbps"].to_numpy())
    # Sums of decimals leave crumbs where nothing runs.
    total[copying.total(np.ones(known.height, dtype=np.int64)) == 0] = 0.0
    return pl.DataFrame(
        {"name": known["sort"][copying.of], "ts_ns": copying.time, "gb_per_s": total}, schema=COLUMNS
    )
