"""HolisticTraceAnalysis' choices, for comparisons with its figures."""

from __future__ import annotations

import polars as pl

import etloom
from etloom.core.trace import Trace


def drop_last_step(trace: Trace) -> Trace:
    """The part that HTA keeps by default: without GPU activity launched after the start of the last step."""
    last = etloom.analyze(trace, "steps")["start_ns"].max()
    late = trace.launches.join(
        trace.events.filter(pl.col("ts") >= last).select("id"), left_on="launch", right_on="id", how="semi"
    )
    return trace.replace(
        events=trace.events.join(
            late, left_on="id", right_on="device_event", how="anti", maintain_order="left"
        )
    )
