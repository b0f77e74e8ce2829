"""Memcpy and memset bandwidth over time, by direction; one row per change.

The bandwidths of concurrent operations of one direction add up. Operations without recorded bandwidth or size are
omitted. See memory-bandwidth-summary for totals.

Units: ns on the trace's clock; GB/s with GB = 1e9 B. Definition: HolisticTraceAnalysis get_memory_bw_time_series.
"""

from __future__ import annotations

from typing import Annotated

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


def analyze(
    trace: Trace, *, step: Annotated[int | None, "Only operations launched in this step."] = None
) -> pl.DataFrame:
    transfers = measure_transfers(trace).drop_nulls("gbps")
    if not transfers.height:
        raise AnalysisError(
            "the trace contains neither sizes nor bandwidths of memcpys",
            where=describe_rank(trace),
            remedy="see memory-bandwidth-summary for their number and durations",
        )
    transfers = filter_step(trace, transfers, step)
    # Transfers shorter than the clock resolution last one tick.
    ends = np.maximum(transfers["end"].to_numpy(), transfers["ts"].to_numpy() + 1)
    running = RunningTotals(transfers["track"].to_numpy(), transfers["ts"].to_numpy(), ends)
    total = running.sum_weights(transfers["gbps"].to_numpy())
    # Remove rounding errors of the sums where nothing runs.
    total[running.sum_weights(np.ones(transfers.height, dtype=np.int64)) == 0] = 0.0
    return pl.DataFrame(
        {"name": transfers["direction"][running.item], "ts_ns": running.time, "gb_per_s": total},
        schema=COLUMNS,
    )
