"""More threads work than the host has processors."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, compute_cost
from etloom.analyses.findings.rank_view import View
from etloom.core import categories

CALLS = 20
"""Of one operator on one shape, so that what it takes usually is known."""
TIMES = 3
SLICE_NS = 500_000
"""A call that takes so many times its usual time, and so much longer, had its processor taken away: schedulers give it
to others for a millisecond and more."""
FEWEST = 3

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    if view.activity.basis == "device":
        return
    calls = view.host("", categories.OPERATOR_CATEGORIES).filter(~categories.is_communication())
    # Of calls that hold no others: what interrupts an inner one interrupts it once.
    inner = calls.filter(~pl.col("id").is_in(view.trace.events["parent"].drop_nulls().unique().implode()))
    alike = ("name", "dims")
    known = (
        inner.join(view.trace.arguments.select("event", "dims"), left_on="id", right_on="event", how="left")
        .with_columns(usual=pl.col("dur").median().over(alike), often=pl.len().over(alike))
        .filter(pl.col("often") >= CALLS)
        .with_columns(start="ts", cost_ns=(pl.col("dur") - pl.col("usual")).round().cast(pl.Int64))
    )
    stopped = known.filter((pl.col("cost_ns") > SLICE_NS) & (pl.col("dur") > TIMES * pl.col("usual")))
    if stopped.height < FEWEST:
        return
    worst = stopped.sort("cost_ns", descending=True, maintain_order=True).row(0, named=True)
    cost_ns, in_steps_ns = compute_cost(view, stopped)
    each_ms = stopped.select(pl.mean("cost_ns") / 1e6).item()
    yield Finding(
        f"{stopped.height:,} calls of operators stand still for {each_ms:.1f} ms each: more "
        "threads work than there are processors, or another program does",
        cost_ns,
        "low",
        "give each rank its own cores: OMP_NUM_THREADS = cores / ranks, torch.set_num_threads, numactl or "
        "torchrun's CPU binding; count the data loader's workers too",
        stopped.height,
        step=worst["step"],
        name=worst["name"],
        event=worst["id"],
        in_steps_ns=in_steps_ns,
    )
