"""Compute num_ops and tensor_size, from which a simulator estimates the time of GPU work with a roofline.

They are the operations and bytes of the call that launched the work, as `etloom analyze flops` defines them (see
docs/flops.md); of a call with several kernels, each has a share by its duration. ASTRA-sim uses them if its roofline is
enabled, and the duration otherwise.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace

_CALL = ["row", "replay"]
_SCHEMA = {"num_ops": pl.Int64, "tensor_size": pl.Int64}


def build_roofline_columns(trace: Trace, events: pl.Series) -> pl.DataFrame:
    """Return num_ops (FLOP) and tensor_size (bytes) of each GPU activity; both null if one is unknown or 0.

    Args:
        trace: A linked trace.
        events: Ids of the GPU work of each row, null for other rows.
    """
    unknown = pl.DataFrame({name: [None] * len(events) for name in _SCHEMA}, schema=_SCHEMA)
    try:
        calls = count_calls(trace).select(*_CALL, "flops", "bytes").drop_nulls()
        work = assign_kernels(trace).filter(pl.col("row") >= 0).select(*_CALL, "id", "dur")
    except AnalysisError:  # no shapes, or no GPU activity
        return unknown
    shared = work.join(calls, on=_CALL).with_columns(
        share=pl.when(pl.col("dur").sum().over(_CALL) > 0)
        .then(pl.col("dur") / pl.col("dur").sum().over(_CALL))
        .otherwise(1 / pl.len().over(_CALL))
    )
    costs = shared.select(
        "id",
        num_ops=(pl.col("flops") * pl.col("share")).round().cast(pl.Int64),
        tensor_size=(pl.col("bytes") * pl.col("share")).round().cast(pl.Int64),
    ).filter((pl.col("num_ops") > 0) & (pl.col("tensor_size") > 0))
    rows = events.cast(pl.UInt32).to_frame("id")
    costs = costs.with_columns(pl.col("id").cast(pl.UInt32)).unique("id", keep="first")
    return rows.join(costs, on="id", how="left", maintain_order="left").select(*_SCHEMA)
