"""Find compilations and captures of device graphs in steady state, and graph breaks that split a compiled step.

`torch.compile` compiles, or a device graph is captured, after the first of several annotated steps (if fewer
are annotated: at any time, which may be the first time); or a compiled step is split into several graphs.
Also on runs without a GPU.

Cost: the compilation; the time between the graphs.
Confidence: high; low if fewer than two steps are annotated, and of pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, compute_cost, format_times, sum_places
from etloom.analyses.findings.host_calls import CAPTURES
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

REGION = r"^Torch-Compiled Region: (\d+)/(\d+)"
GUARDS = (
    "TORCH_LOGS=recompiles shows the guard that failed: mark dynamic dimensions (mark_dynamic), keep shapes and Python "
    "values stable"
)

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    compiles, since = view.compiles, view.steady_start
    if since is not None:
        compiles = compiles.filter(pl.col("ts") >= since)

    subject = _describe_subject(compiles["name"].str.contains(CAPTURES))

    def title(row: dict[str, Any]) -> str:
        times = format_times(row["count"])
        if since is None:
            return f"{subject} {times} ({view.warmup_caveat}: may be the first time)"
        return f"{subject} after the first step, too ({times})"

    yield from sum_places(
        view,
        compiles.select("step", "name", "end", start="ts", cost_ns="dur", event="id"),
        title,
        confidence="low" if since is None else "high",
        advice=f"warm up before the trace; if it persists, {GUARDS}",
        tracks=HOST,
        by="name",
    )
    regions = (
        view.find_host_events(REGION)
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
    gaps = ordered.with_columns(cost_ns=pl.col("ts") - pl.col("before")).filter(
        (pl.col("cost_ns") > 0) & (pl.col("region") != pl.col("region").shift(1))
    )
    if gaps.height:
        worst = gaps.sort("cost_ns", descending=True, maintain_order=True).row(0, named=True)
        cost_ns, in_steps_ns = compute_cost(view, gaps.select("cost_ns", start="before", end="ts"))
        yield Finding(
            f"graph breaks split the compiled step into {pieces} graphs, with Python code between them",
            cost_ns,
            "low",
            "TORCH_LOGS=graph_breaks shows the causes; fullgraph=True turns a graph break into an error",
            Intervals.of(gaps["before"], gaps["ts"]),
            HOST,
            gaps.height,
            step=worst["step"],
            name=worst["name"],
            event=worst["id"],
            start_ns=worst["before"],
            end_ns=worst["ts"],
            in_steps_ns=in_steps_ns,
            kind="graph breaks",
        )


def _describe_subject(is_capture: pl.Series) -> str:
    if not is_capture.any():
        return "torch.compile compiles"
    return (
        "device graphs are captured"
        if is_capture.all()
        else "torch.compile compiles and captures device graphs"
    )
