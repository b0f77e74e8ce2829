"""Find loops that read single values of tensors (`.item()`), for example one per parameter."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, sum_places
from etloom.analyses.findings.operator_runs import find_operator_runs
from etloom.analyses.findings.patterns.tiny_operators import MAX_READ_SHARE
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis == "device":
        return
    runs = find_operator_runs(view).filter(pl.col("reads") >= MAX_READ_SHARE * pl.col("count"))
    reads = int(runs["reads"].sum())
    yield from sum_places(
        view,
        runs.select("step", "start", "end", "cost_ns", name="read_name", event="read_event"),
        lambda _: f"loops that read values of tensors {reads:,} times (.item(), float(), if tensor)",
        confidence="medium",
        advice="compute the values of all parameters together (torch._foreach_norm, torch.stack) and read them with "
        "one .tolist(), not in every step",
        tracks=HOST,
        by="name",
    )
