"""Gives the events of rocprofv3's Perfetto traces Kineto's categories, names and columns."""

from __future__ import annotations

import polars as pl

from etloom.core.arrays import is_in
from etloom.core.trace import Trace
from etloom.formats.rocprof.activities import name_copy

_CATEGORIES = {
    "kernel_dispatch": "kernel",
    "memory_copy": "gpu_memcpy",
    "hip_api": "cuda_runtime",
    "hsa_api": "cuda_driver",
    "marker_api": "user_annotation",
}
_ACTIVITIES = ("kernel_dispatch", "memory_copy")


def categorize(trace: Trace) -> Trace:
    """Return a trace of rocprofv3 with Kineto's categories; any other trace as it is.

    The device of GPU activity is the number of its agent, counted over agents with activity; the stream is the number
    of its track.
    """
    events = trace.events
    if not is_in(events["cat"], list(_CATEGORIES)).any():
        return trace
    cat, args = pl.col("cat").cast(pl.String), pl.col("args").cast(pl.String)

    def argument(name: str) -> pl.Expr:
        return args.str.extract(rf'"{name}": "?(\d{{1,18}})\b').cast(pl.Int64)

    is_activity = cat.is_in(_ACTIVITIES)
    agent = pl.when(is_activity).then(pl.coalesce(argument("agent"), argument("dst_agent"), 0))
    # Tracks are identified by text, whose numbers count downwards.
    track = pl.when(is_activity).then("tid").rank("dense", descending=True).cast(pl.Int64) - 1
    is_call = cat.is_in(list(_CATEGORIES)) & (cat != "marker_api")
    name = pl.col("name").cast(pl.String)
    named = pl.when(cat == "memory_copy").then(name_copy(name)).otherwise(name)
    return trace.replace(
        events=events.with_columns(
            cat=cat.replace(_CATEGORIES).cast(pl.Categorical),
            name=named.cast(pl.Categorical),
            device=pl.coalesce("device", (agent.rank("dense") - 1).cast(pl.Int32)),
            stream=pl.coalesce(
                "stream", pl.when(is_activity).then(pl.coalesce(argument("stream_ID"), track))
            ),
            correlation=pl.when(is_call)
            .then(pl.coalesce("correlation", argument("corr_id")))
            .otherwise("correlation"),
        )
    )
