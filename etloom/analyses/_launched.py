"""Device work with the call that launched it and the operator around that call."""

from __future__ import annotations

import polars as pl

from etloom.activity import device_work, of_rank
from etloom.analyses._operators import row_of
from etloom.errors import AnalysisError
from etloom.trace import Trace


def launched(trace: Trace) -> pl.DataFrame:
    """Device work by start: id, cat, kind, name, device, stream, correlation, step, ts, end, dur, and of its launch
    call, null where that lies outside the trace: launch (id), api, launch_ts, launch_end, operator (id).

    Raises AnalysisError for a trace without device work, and for one that is not linked.
    """
    if not trace.meta.get("linked"):
        raise AnalysisError(
            "the trace is not linked", where=of_rank(trace), remedy="etloom.link(trace), or etloom.open"
        )
    work = device_work(trace)
    if not work.height:
        raise AnalysisError(
            "the trace holds no device work",
            where=of_rank(trace),
            remedy="record it with the profiler's CUDA activity",
        )
    calls = trace.launches.unique("device_event", keep="first", maintain_order=True).drop_nulls("launch")
    rows = row_of(trace.events, calls["launch"])
    calls = calls.filter(pl.Series(rows >= 0))
    # Only the calls are looked at: an event table is ten times as long, and its names are texts.
    said = trace.events.select("name", "ts", "dur")[rows[rows >= 0]]
    calls = calls.hstack(
        said.select(
            api=pl.col("name").cast(pl.String),
            launch_ts="ts",
            launch_end=pl.col("ts") + pl.col("dur").fill_null(0),
        )
    )
    return (
        work.join(calls, left_on="id", right_on="device_event", how="left", maintain_order="left")
        .select(
            *("id", pl.col("cat", "kind", "name").cast(pl.String), "device", "stream", "correlation", "step"),
            *("ts", "dur", "launch", "api", "launch_ts", "launch_end", "operator"),
            end=pl.col("ts") + pl.col("dur"),
        )
        .sort("ts", "id")
    )
