"""Hardware counters of kernels, grouped by the operator that launched them.

One row per counter, kernel name and operator around the launch: operator is the innermost one and top_operator the
outermost one of the thread; null if the launch is outside of all operators. launches: number of measured kernels.
total, mean, min and max: of the values of the single kernels, in the unit of the counter.

Kineto measures one kernel at a time and writes a cuda_profiler_range for each, without correlation and with artificial
timestamps; only the order connects a range to its launch. Therefore the numbers of ranges and kernel launches must be
equal.

Definition: HolisticTraceAnalysis get_cupti_counter_data_with_operators, which lists the single kernels.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import Annotated, Any

import numpy as np
import polars as pl

from etloom.analyses.helpers import conform_columns, require_linked
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
COLUMNS = {
    "counter": pl.String,
    "operator": pl.String,
    "top_operator": pl.String,
    "kernel": pl.String,
    "launches": pl.Int64,
    "total": pl.Float64,
    "mean": pl.Float64,
    "min": pl.Float64,
    "max": pl.Float64,
}
RANGE_CATEGORY = "cuda_profiler_range"
"""The category of a measured kernel."""
_LAUNCHES_KERNEL = r"^(?:cuda|cu|hip)\w*Launch\w*Kernel"
_VALUE = pl.List(pl.Struct({"counter": pl.String, "value": pl.Float64}))


def analyze(
    trace: Trace,
    *,
    counter: Annotated[str | None, "Only counters whose name matches this glob."] = None,
    by: Annotated[str, "operator, or kernel (without operators; needs no launches)."] = "operator",
) -> pl.DataFrame:
    require_linked(trace)
    if by not in ("operator", "kernel"):
        raise UnknownName("grouping", by, ("operator", "kernel"), option="by")
    ranges = trace.events.filter(pl.col("cat") == RANGE_CATEGORY).sort("ts", "id")
    ranges = parse_distinct(ranges, "args", _values, _VALUE, alias="values")
    missing = pl.lit(None, pl.String)
    if by == "operator" and ranges.height:
        ranges = ranges.hstack(_operators(trace, ranges))
    else:
        ranges = ranges.with_columns(operator=missing, top_operator=missing)
    values = (
        ranges.select("operator", "top_operator", pl.col("name").cast(pl.String).alias("kernel"), "values")
        .explode("values")
        .unnest("values")
        .drop_nulls("value")
    )
    if not values.height:
        raise AnalysisError(
            "the trace contains no hardware counters of kernels",
            where=describe_rank(trace),
            remedy="profile with experimental_config=torch._C._profiler._ExperimentalConfig(profiler_metrics=[...])",
        )
    if counter is not None:
        matching = [name for name in values["counter"].unique() if fnmatchcase(name, counter)]
        if not matching:
            raise UnknownName("counter", counter, values["counter"].unique().sort())
        values = values.filter(pl.col("counter").is_in(matching))
    value = pl.col("value")
    table = values.group_by("counter", "operator", "top_operator", "kernel").agg(
        pl.len().alias("launches"),
        value.sum().alias("total"),
        value.mean().alias("mean"),
        value.min().alias("min"),
        value.max().alias("max"),
    )
    order = ("counter", "total", "operator", "top_operator", "kernel")
    return conform_columns(
        table.sort(order, descending=[False, True, False, False, False], nulls_last=True), COLUMNS
    )


def _values(args: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"counter": name, "value": float(value)}
        for name, value in args.items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    ]


def match_launches(trace: Trace, ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the launch call of each kernel with counters, matched by time order; raise AnalysisError if the match is
    ambiguous."""
    events = trace.events
    calls = categories.mask_events(events, categories.RUNTIME_CATEGORIES) & arrays.match_text(
        events["name"], _LAUNCHES_KERNEL
    )
    launches = events.filter(pl.Series(calls)).sort("ts", "id")
    devices = ranges["pid"].n_unique()
    if launches.height != ranges.height or devices > 1:
        raise AnalysisError(
            f"{ranges.height} measured kernels of {devices} device(s) and {launches.height} launches cannot be "
            "joined by their order",
            where=describe_rank(trace),
            remedy="use by=kernel, which needs no operators",
        )
    return launches


def _operators(trace: Trace, ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the innermost and outermost operator around the launch of each measured kernel, in time order."""
    events, launches = trace.events, match_launches(trace, ranges)
    is_operator = categories.mask_events(events, categories.OPERATOR_CATEGORIES)
    parent = rows_of_ids(events, events["parent"])
    inner = nesting.find_nearest_ancestor(parent, is_operator, rows_of_ids(events, launches["id"]))
    # The outermost operator has no enclosing operator.
    around = nesting.find_nearest_ancestor(parent, is_operator, parent)
    outermost = is_operator & (around < 0)
    outer = nesting.find_nearest_ancestor(parent, outermost, inner)
    names = events["name"].cast(pl.String)
    return pl.DataFrame(
        {
            name: names[np.maximum(rows, 0)].set(pl.Series(rows < 0), None)
            for name, rows in (("operator", inner), ("top_operator", outer))
        }
    )
