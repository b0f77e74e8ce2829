"""Bandwidth of all communication of a rank together: bus bytes over the time in which it communicates at all.

Communications that run at the same time share the links, so that the bandwidth of each looks lower than what the rank
reaches. bus_bytes: the bytes of each communication times the bus factor of nccl-tests (of an uneven all-to-all: what
crosses the busier direction), summed. busy_ns: the union of the times of these communications. sized: number of
communications whose size is known, which alone count; communications: number of all.

Units: B, ns, GB/s with GB = 1e9 B. Definition: SharedBW of PARAM's et_replay (profiler_trace_analysis).
"""

from __future__ import annotations

import polars as pl

from etloom.collectives import list_participations
from etloom.collectives.participations import get_bus_factor
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "communications": pl.Int64,
    "sized": pl.Int64,
    "bus_bytes": pl.Int64,
    "busy_ns": pl.Int64,
    "shared_gb_per_s": pl.Float64,
}


def analyze(trace: Trace) -> pl.DataFrame:
    rows = trace.compute_once(list_participations, trace.rank or 0)
    factors = [get_bus_factor(*row) for row in rows.select("collective", "group_size").iter_rows()]
    moved = pl.coalesce(
        pl.when("uneven").then("moved"), pl.col("bytes") * pl.Series(factors, dtype=pl.Float64)
    )
    sized = rows.with_columns(bus_bytes=moved).drop_nulls(["bus_bytes", "start", "end"])
    busy_ns = Intervals.of(sized["start"], sized["end"]).total
    bus_bytes = round(sized["bus_bytes"].sum())
    row = (len(rows), len(sized), bus_bytes, busy_ns, bus_bytes / busy_ns if busy_ns else None)
    return pl.DataFrame([row], schema=COLUMNS, orient="row")
