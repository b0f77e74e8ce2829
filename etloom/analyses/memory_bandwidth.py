"""The bandwidth of copies and sets over time, by sort: a row a change.

Copies of one sort that run at the same time add up. Those of which the trace states neither bandwidth nor size are left
out. memory-bandwidth-summary sums up.

Units: ns on the trace's clock; GB/s with GB = 1e9 B. Definition: HolisticTraceAnalysis get_memory_bw_time_series.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses._bandwidth import copies
from etloom.trace import Trace

SCOPE = "rank"
COLUMNS = {"name": pl.String, "ts_ns": pl.Int64, "bandwidth": pl.Float64}


def analyze(trace: Trace) -> pl.DataFrame:
    known = copies(trace).drop_nulls("gbps")
    begun = known.select(name="sort", ts_ns="ts", change="gbps")
    # What lasts less than the clock's grain lasts one tick.
    done = known.select(name="sort", ts_ns=pl.max_horizontal("end", pl.col("ts") + 1), change=-pl.col("gbps"))
    table = (
        pl.concat((begun, done)).group_by("name", "ts_ns").agg(pl.col("change").sum()).sort("name", "ts_ns")
    )
    total = pl.col("change").cum_sum().over("name")
    # Sums of decimals leave crumbs where nothing runs.
    return table.select(
        "name", "ts_ns", bandwidth=pl.when(total.abs() < 1e-9).then(0.0).otherwise(total)
    ).cast(COLUMNS)  # type: ignore[arg-type]
