"""Find optimizers that update one parameter after the other, with several small kernels or operators for each.

Steps of an optimizer (`Optimizer.step#`) in which an operator runs for 16 parameters or more, one after the
other, without foreach. Also on runs without a GPU.

Cost: the host's time except one parameter's, and 2 µs and the pause of each kernel.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, sum_places
from etloom.analyses.findings.host_calls import select_outermost
from etloom.analyses.findings.operator_runs import OPTIMIZER_STEP, find_operator_runs
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.findings.removed_work import REGION_SCHEMA, list_launched, sum_removed
from etloom.core import arrays, categories, nesting
from etloom.core.intervals import Intervals

SCOPE = "rank"
MIN_PARAMETERS = 16
"""Times that an operator has to run in one step of the optimizer."""
FIXED_NS = 2_000
"""A kernel takes about this long however little it does."""
_BATCHED = r"^aten::_(?:foreach|fused)"
_ADVICE = (
    "build the optimizer with fused=True or foreach=True, and call zero_grad and gradient clipping with foreach=True; "
    "the cost counts the host's time and the fixed time of each kernel, fusing saves passes over memory too"
)


def find(view: RankView) -> Iterator[Finding]:
    regions = view.compute_once(find_parameter_loops)
    if regions.is_empty():
        return
    name = str(regions["name"][0]).partition("#")[2].partition(".")[0]
    count = round(regions["count"].sum() / regions.height)
    title = f"{name} updates its parameters one by one: {count:,} operators a step"
    if view.activity.basis == "device":
        launched = list_launched(view, regions)
        fixed = pl.min_horizontal("dur", pl.lit(FIXED_NS)) + (pl.col("cost_ns") - pl.col("dur"))
        launched = launched.with_columns(cost_ns=fixed)
        yield from sum_removed(view, regions, title, launched, confidence="medium", advice=_ADVICE)
        return
    runs = find_operator_runs(view)
    yield from sum_places(
        view,
        runs.filter(mask_updates(runs, regions)),
        lambda _: title,
        confidence="medium",
        advice=_ADVICE,
        tracks=HOST,
        by="name",
    )


def find_parameter_loops(view: RankView) -> pl.DataFrame:
    """Return the steps of optimizers that repeat operators for each parameter; ``count``: number of operators."""
    steps = view.find_host_events(OPTIMIZER_STEP, categories.ANNOTATION_CATEGORIES)
    schema = REGION_SCHEMA | {"count": pl.Int64}
    if steps.is_empty():
        return pl.DataFrame(schema=schema)
    calls = select_outermost(view.find_host_events("", categories.OPERATOR_CATEGORIES))
    within = nesting.find_innermost(steps["ts"], steps["end"], calls["ts"])
    loops = (
        calls.with_columns(within=arrays.take_rows(steps["id"], within))
        .drop_nulls("within")
        .group_by("within", "name")
        .len()
        .group_by("within")
        .agg(
            count=pl.col("len").sum().cast(pl.Int64),
            most=pl.col("len").max(),
            batched=pl.col("name").str.contains(_BATCHED).any(),
        )
        .filter((pl.col("most") >= MIN_PARAMETERS) & ~pl.col("batched"))
    )
    rows = steps.join(loops, left_on="id", right_on="within").sort("ts")
    cost = ((pl.col("end") - pl.col("ts")) * (1 - 1 / pl.col("most"))).round().cast(pl.Int64)
    regions = rows.select("end", "step", "name", "count", "most", start="ts", event="id", cost_ns=cost)
    if view.activity.basis == "device":  # else the loop updates counters on the host
        launched = list_launched(view, regions)["region"].to_numpy()
        kernels = np.bincount(launched, minlength=regions.height)
        regions = regions.filter(pl.Series(kernels >= regions["most"].to_numpy()))
    return regions.select(pl.col(name).cast(dtype) for name, dtype in schema.items())


def mask_updates(runs: pl.DataFrame, regions: pl.DataFrame) -> pl.Series:
    """Return a mask of the runs of operators that lie in the regions and mostly change tensors in place."""
    covered = Intervals.of(regions["start"], regions["end"]).covered(runs["start"], runs["end"])
    is_inside = 2 * covered >= (runs["end"] - runs["start"]).to_numpy()
    return runs["name"].str.ends_with("_") & pl.Series(is_inside, dtype=pl.Boolean)
