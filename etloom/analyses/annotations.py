"""User annotations: how often each name occurs, how long it lasts, on the host and on the device.

where: host, the record_function range itself; device, the time from the first to the last kernel launched in it, as
Kineto draws it (gpu_user_annotation). total sums all ranges; pct is the time in which some range of the name is open,
of that from the first to the last annotation there.

where: only these: host or device. step: only this step.

Units: ns (std of a sample, null of one), percent. Definition: HolisticTraceAnalysis get_gpu_user_annotation_breakdown,
which is wrong where more names occur than it lists.
"""

from __future__ import annotations

import polars as pl

from etloom import kinds
from etloom.analyses._activity import answer, in_step, of_rank, percent
from etloom.errors import AnalysisError, UnknownName
from etloom.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "where": pl.String,
    "name": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "std_ns": pl.Int64,
    "min_ns": pl.Int64,
    "max_ns": pl.Int64,
    "pct": pl.Float64,
}
ON_DEVICE = "gpu_user_annotation"


def analyze(trace: Trace, *, where: str | None = None, step: int | None = None) -> pl.DataFrame:
    if where not in (None, "host", "device"):
        raise UnknownName("place", str(where), ("host", "device"))
    on_device = pl.col("cat") == ON_DEVICE
    is_mark = (pl.col("cat").is_in(list(kinds.ANNOTATIONS)) | on_device) & pl.col("dur").is_not_null()
    marks = trace.events.lazy().filter(is_mark).select("cat", "name", "ts", "dur", "step").collect()
    marks = marks.with_columns(where=pl.when(on_device).then(pl.lit("device")).otherwise(pl.lit("host")))
    marks = marks if where is None else marks.filter(pl.col("where") == where)
    if not marks.height:
        raise AnalysisError(
            "the trace holds no annotations",
            where=of_rank(trace),
            remedy="mark parts of the step with torch.profiler.record_function",
        )
    end = pl.col("ts") + pl.col("dur")
    marks = marks.with_columns(end=end, span=(end.max() - pl.col("ts").min()).over("where"))
    chosen = in_step(trace, marks, step)
    # What a range adds to the time in which its name is open: events are in order of start.
    since = pl.max_horizontal("ts", pl.col("end").cum_max().shift(1).over("where", "name"))
    dur = pl.col("dur")
    table = (
        chosen.with_columns(open=(pl.col("end") - since).clip(0))
        .group_by("where", "name")
        .agg(
            pl.len().alias("count"),
            dur.sum().alias("total_ns"),
            dur.mean().round().alias("mean_ns"),
            dur.std().round().alias("std_ns"),
            dur.min().alias("min_ns"),
            dur.max().alias("max_ns"),
            pl.col("span").first(),
            pl.col("open").sum(),
        )
        .with_columns(percent("open", "span").alias("pct"))
    )
    return answer(table, COLUMNS).sort("where", "total_ns", "name", descending=(False, True, False))
