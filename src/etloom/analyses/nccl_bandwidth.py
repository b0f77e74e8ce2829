"""Time and bandwidth of communications by algorithm, protocol and channels, recorded by NCCL's profilers.

One row per communicator, collective, message size, algorithm, protocol and number of channels. duration: of the
kernel on all channels if it was recorded (timing: kernel...), else null (host: the call returns before the transfer
starts); a rank that arrives early waits within it, so min_ns is closest to the transfer. algo_gb_per_s and
bus_gb_per_s: the mean of what the NCCL Inspector states, else computed from mean_ns as nccl-tests does. Null where
the message size or the number of ranks is unknown: the profiler plugin states no number of ranks, and the count of an
all-gather or a reduce-scatter is that of one rank.

group: hash of the communicator.

Units: ns, B, GB/s with GB = 1e9 B. Definition of bandwidths: nccl-tests (PERFORMANCE.md).
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.collectives import get_bus_factor
from etloom.core.categories import NCCL_COLLECTIVE
from etloom.core.errors import AnalysisError
from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
COLUMNS = {
    "group": pl.String,
    "group_size": pl.Int64,
    "axis": pl.String,
    "collective": pl.String,
    "bytes": pl.Int64,
    "algorithm": pl.String,
    "protocol": pl.String,
    "channels": pl.Int64,
    "timing": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "min_ns": pl.Int64,
    "mean_ns": pl.Float64,
    "max_ns": pl.Int64,
    "algo_gb_per_s": pl.Float64,
    "bus_gb_per_s": pl.Float64,
}
_KEYS = ("group", "collective", "bytes", "algorithm", "protocol", "channels", "timing")
_TEXTS = ("algorithm", "protocol", "timing")
_NUMBERS = {
    "channels": pl.Int64,
    "message_bytes": pl.Int64,
    "algo_gb_per_s": pl.Float64,
    "bus_gb_per_s": pl.Float64,
}


def analyze(trace: Trace) -> pl.DataFrame:
    calls = _list_calls(trace)
    if calls.is_empty():
        raise AnalysisError(
            "the trace contains no communication recorded by NCCL's profilers",
            where=describe_rank(trace),
            remedy="read the JSON of NCCL's profiler plugin or of the NCCL Inspector; see collectives for other traces",
        )
    dur = pl.col("dur")
    table = calls.group_by(_KEYS).agg(
        pl.col("group_size", "axis").first(),
        pl.len().alias("count"),
        pl.when(dur.count() > 0).then(dur.sum()).alias("total_ns"),
        dur.min().alias("min_ns"),
        dur.mean().alias("mean_ns"),
        dur.max().alias("max_ns"),
        pl.col("algo_gb_per_s", "bus_gb_per_s").mean(),
    )
    factors = pl.Series(
        "factor",
        [get_bus_factor(*row) for row in table.select("collective", "group_size").iter_rows()],
        dtype=pl.Float64,
    )
    bandwidth = pl.when(pl.col("mean_ns") > 0).then(pl.col("bytes") / pl.col("mean_ns"))
    table = table.with_columns(factors, algo_gb_per_s=pl.coalesce("algo_gb_per_s", bandwidth)).with_columns(
        bus_gb_per_s=pl.coalesce("bus_gb_per_s", pl.col("algo_gb_per_s") * pl.col("factor"))
    )
    return conform_columns(table, COLUMNS).sort(
        "total_ns", *_KEYS, descending=[True, *[False] * len(_KEYS)], nulls_last=True
    )


def _list_calls(trace: Trace) -> pl.DataFrame:
    """Return the communications that NCCL's profilers recorded: duration, facts from the table comms, details in
    args."""
    fields = {**dict.fromkeys(_TEXTS, pl.String), **_NUMBERS}

    def parse(args: object) -> dict[str, object]:
        values = args if isinstance(args, dict) else {}
        texts: dict[str, object] = {
            key: value if isinstance(value := values.get(key), str) else None for key in _TEXTS
        }
        return texts | {
            key: value if type(value := values.get(key)) in (int, float) else None for key in _NUMBERS
        }

    events = trace.events.filter(pl.col("cat") == NCCL_COLLECTIVE).select("id", "dur", "args")
    parsed = parse_distinct(events, "args", parse, pl.Struct(fields), alias="facts").unnest("facts")
    comms = trace.comms.select(
        "event",
        "group_size",
        group=pl.col("pg_name").cast(pl.String),
        collective=pl.col("collective").cast(pl.String),
    )
    axes = trace.groups.select(group=pl.col("pg_name").cast(pl.String), axis=pl.col("axis").cast(pl.String))
    return (
        parsed.join(comms, left_on="id", right_on="event", how="inner")
        .join(axes.unique("group", keep="first"), on="group", how="left")
        .rename({"message_bytes": "bytes"})
    )
