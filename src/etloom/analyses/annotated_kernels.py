"""GPU activities grouped by the annotation that launched them: the kernels each record_function range ran.

annotation is the innermost record_function range around the call that launched the activity; null if there is none or
if the launch was not recorded. A kernel of a device graph that torch.cuda's graph annotations name has that name: of
its range, else of its module. One row per annotation and kernel name; all kernels of one name are counted together.

Units: ns. Definition: HolisticTraceAnalysis get_gpu_kernels_with_user_annotations, but assigned by launch instead of by
overlap in time with Kineto's device ranges, because ranges that are neighbors on a stream share kernels.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import LaunchStep, conform_columns, filter_step
from etloom.analyses.helpers.launched_work import (
    find_annotations,
    read_graph_annotations,
    select_launched_work,
)
from etloom.core import arrays
from etloom.core.errors import UnknownName
from etloom.core.trace import Trace

SCOPE = "rank"
COLUMNS = {
    "annotation": pl.String,
    "name": pl.String,
    "kind": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "max_ns": pl.Int64,
}


def analyze(
    trace: Trace,
    *,
    annotation: Annotated[str | None, "Only ranges with this name."] = None,
    by: Annotated[str, "kernel (one row per kernel name) or annotation (one row per annotation)."] = "kernel",
    step: LaunchStep = None,
) -> pl.DataFrame:
    if by not in ("kernel", "annotation"):
        raise UnknownName("grouping", by, ("kernel", "annotation"), option="by")
    work = filter_step(trace, add_annotation(trace), step)
    work = work if annotation is None else work.filter(pl.col("annotation") == annotation)
    dur = pl.col("dur")
    if by == "annotation":
        work = work.with_columns(pl.lit(None, pl.String).alias("name"), pl.lit(None, pl.String).alias("kind"))
    table = work.group_by("annotation", "name", "kind").agg(
        pl.len().alias("count"),
        dur.sum().alias("total_ns"),
        dur.mean().round().alias("mean_ns"),
        dur.max().alias("max_ns"),
    )
    return conform_columns(table, COLUMNS).sort(
        "annotation", "total_ns", "name", descending=(False, True, False), nulls_last=True
    )


def add_annotation(trace: Trace) -> pl.DataFrame:
    """Return GPU activities (launch, step, name, kind, dur) with the innermost ``annotation`` around their launch."""
    work = select_launched_work(trace, "id", "launch", "step", "name", "kind", "dur")
    at = find_annotations(trace, work["launch"])
    named = read_graph_annotations(trace, work["id"]).with_columns(
        around=arrays.take_rows(trace.events["name"], at)
    )
    annotation = pl.coalesce(pl.col("annotation", "module", "around").cast(pl.String).cast(pl.Categorical))
    return work.drop("id").with_columns(named.select(annotation.alias("annotation")))
