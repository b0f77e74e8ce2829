"""More threads work than the host has processors."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom import kinds
from etloom.patterns._finding import Finding
from etloom.patterns._view import View

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
    calls = view.host("", kinds.OPERATORS).filter(~kinds.is_communication())
    # Of calls that hold no others: what interrupts an inner one interrupts it once.
    inner = calls.filter(~pl.col("id").is_in(view.trace.events["parent"].drop_nulls().unique().implode()))
    alike = ("name", "dims")
    known = (
        inner.join(view.trace.arguments.select("event", "dims"), left_on="id", right_on="event", how="left")
        .with_columns(usual=pl.col("dur").median().over(alike), often=pl.len().over(alike))
        .filter(pl.col("often") >= CALLS)
        .with_columns(over=(pl.col("dur") - pl.col("usual")).round().cast(pl.Int64))
    )
    stopped = known.filter((pl.col("over") > SLICE_NS) & (pl.col("dur") > TIMES * pl.col("usual")))
    if stopped.height < FEWEST:
        return
    worst = stopped.sort("over", descending=True, maintain_order=True).row(0, named=True)
    cost = int(stopped["over"].sum())
    yield Finding(
        f"{stopped.height:,} calls of operators stand still for {cost / stopped.height / 1e6:.1f} ms each: more "
        "threads work than there are processors, or another program does",
        cost,
        "low",
        "give each rank its own cores: OMP_NUM_THREADS = cores / ranks, torch.set_num_threads, numactl or "
        "torchrun's CPU binding; count the data loader's workers too",
        stopped.height,
        step=worst["step"],
        name=worst["name"],
        event=worst["id"],
        in_steps_ns=int(stopped["over"].filter(stopped["step"].is_not_null()).sum()),
    )
