"""User annotations: how often each name occurs and how long it lasts, on the host and on the device.

A row with where = host covers the record_function ranges themselves. With where = device, it covers, per stream, the
time from the start of the first to the end of the last activity launched directly in the range (not in a nested
annotation). Kineto records the same (gpu_user_annotation, up to 1.5 µs longer), which is used if the trace has no
launches. total_ns sums all ranges; pct is
the share of time in which at least one range of this name is open, relative to the time from the first to the last
annotation there (or in the step).

Units: ns (std of a sample, null for one range), percent. Definition: HolisticTraceAnalysis
get_gpu_user_annotation_breakdown, which is wrong if there are more names than it lists.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import Step, conform_columns, filter_step, percent, require_linked
from etloom.core import arrays, categories, nesting
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, select_launched_events

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


def analyze(
    trace: Trace,
    *,
    where: Annotated[str | None, "Only these annotations: host or device."] = None,
    step: Step = None,
) -> pl.DataFrame:
    if where not in (None, "host", "device"):
        raise UnknownName("place", str(where), ("host", "device"), option="where")
    require_linked(trace)
    places = {"host": _on_host, "device": _on_device}
    tables = [
        places[name](trace).with_columns(where=pl.lit(name)) for name in places if where in (None, name)
    ]
    ranges = pl.concat(tables).sort("ts", maintain_order=True)
    if not ranges.height:
        raise AnalysisError(
            "the trace contains no annotations",
            where=describe_rank(trace),
            remedy="annotate parts of the step with torch.profiler.record_function",
        )
    end = pl.col("ts") + pl.col("dur")
    ranges = filter_step(trace, ranges, step).with_columns(
        end=end, span=(end.max() - pl.col("ts").min()).over("where")
    )
    # The time a range adds to the open time of its name; ranges are sorted by start.
    since = pl.max_horizontal("ts", pl.col("end").cum_max().shift(1).over("where", "name"))
    dur = pl.col("dur")
    table = (
        ranges.with_columns(open=(pl.col("end") - since).clip(0))
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
    return conform_columns(table, COLUMNS).sort("where", "total_ns", "name", descending=(False, True, False))


def _on_host(trace: Trace) -> pl.DataFrame:
    """Return a table of the user annotations on the host: name, ts, dur (ns) and step of each."""
    return _ranges(trace, pl.col("cat").is_in(list(categories.ANNOTATION_CATEGORIES)))


def _ranges(trace: Trace, condition: pl.Expr) -> pl.DataFrame:
    ranges = trace.events.lazy().filter(condition & pl.col("dur").is_not_null())
    return ranges.select("name", "ts", "dur", "step").collect()


def _on_device(trace: Trace) -> pl.DataFrame:
    """Return the time span (name, ts, dur in ns, step) of the GPU activity launched directly in each annotation, per
    stream."""
    events = trace.events
    work = select_launched_events(trace, "launch", "device", "stream", "ts", "end").drop_nulls("launch")
    is_annotation = categories.mask_events(events, categories.ANNOTATION_CATEGORIES) & arrays.is_present(
        events["dur"]
    )
    parent = arrays.rows_of_ids(events, events["parent"])
    at = nesting.find_nearest_ancestor(parent, is_annotation, arrays.rows_of_ids(events, work["launch"]))
    spans = (
        work.with_columns(pl.Series("mark", at))
        .filter(pl.col("mark") >= 0)
        .group_by("mark", "device", "stream", maintain_order=True)
        .agg(pl.col("ts").min(), dur=pl.col("end").max() - pl.col("ts").min())
    )
    if not spans.height:
        return _ranges(trace, pl.col("cat") == ON_DEVICE)
    names = arrays.take_rows(events.select("name", "step"), spans["mark"].to_numpy())
    return spans.hstack(names).select("name", "ts", "dur", "step")
