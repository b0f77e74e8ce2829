"""torch.compile works in steady state, or a graph breaks into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import Finding, compute_cost, group_by_place, times
from etloom.analyses.findings.rank_view import View, select_outermost

COMPILES = (
    r"dynamo_timed|^compile_fx|_compile\.compile_inner|^convert_frame|^aot_autograd"
    r"|inductor_compile|^CachingAutotuner\.(?:benchmark|precompile)"
)
REGION = r"^Torch-Compiled Region: (\d+)/(\d+)"
GUARDS = (
    "TORCH_LOGS=recompiles names the guard that failed: mark dynamic dimensions (mark_dynamic), keep shapes and Python "
    "values stable"
)

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    compiles, since = select_outermost(view.host(COMPILES)), view.steady_from
    if since is not None:
        compiles = compiles.filter(pl.col("ts") >= since)

    def title(row: dict[str, Any]) -> str:
        if since is None:
            return f"torch.compile compiles, {times(row['count'])} ({view.unsure}: it may be the first time)"
        return f"torch.compile still compiles after the first step, {times(row['count'])}"

    yield from group_by_place(
        view,
        compiles.select("step", "name", "end", start="ts", cost_ns="dur", event="id"),
        title,
        confidence="low" if since is None else "high",
        advice=f"warm up before the trace; if it stays, {GUARDS}",
        by="name",
    )
    regions = (
        view.host(REGION)
        .with_columns(
            region=pl.col("name").str.extract(REGION, 1), version=pl.col("name").str.extract(REGION, 2)
        )
        .drop_nulls("region")
    )
    pieces = regions["region"].n_unique()
    if pieces < 2:
        return
    ordered = regions.sort("pid", "tid", "ts")
    ordered = ordered.with_columns(before=pl.col("end").shift(1).over("pid", "tid", "step"))
    lost = ordered.with_columns(cost_ns=pl.col("ts") - pl.col("before")).filter(
        (pl.col("cost_ns") > 0) & (pl.col("region") != pl.col("region").shift(1))
    )
    if lost.height:
        worst = lost.sort("cost_ns", descending=True, maintain_order=True).row(0, named=True)
        cost_ns, in_steps_ns = compute_cost(view, lost.select("cost_ns", start="before", end="ts"))
        yield Finding(
            f"the compiled step is in {pieces} pieces, with Python between them",
            cost_ns,
            "low",
            "TORCH_LOGS=graph_breaks names what broke it; fullgraph=True makes a break an error",
            lost.height,
            step=worst["step"],
            name=worst["name"],
            event=worst["id"],
            in_steps_ns=in_steps_ns,
        )
