"""More threads work than the host has processors."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom import kinds
from etloom.patterns._finding import Finding
from etloom.patterns._view import View

CALLS = 20
UNSTEADY = 3.0
"""Slowest tenth over median of one operator on one shape: on a processor of its own it stays below 2."""

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    if view.activity.basis == "device":
        return
    # What one operator on one shape takes differs little, unless something else takes its processor away.
    calls = view.host("", kinds.OPERATORS).filter(pl.col("dur") >= 20_000)
    shaped = calls.join(view.trace.arguments.select("event", "dims"), left_on="id", right_on="event")
    groups = (
        shaped.filter(~kinds.is_communication())
        .group_by("name", "dims")
        .agg(
            pl.len().alias("count"),
            pl.col("dur").median().alias("usual"),
            pl.col("dur").quantile(0.9).alias("slow"),
            (pl.col("dur") - pl.col("dur").median()).clip(0).sum().alias("over"),
        )
        .filter(pl.col("count") >= CALLS)
    )
    unsteady = groups.filter(pl.col("slow") > UNSTEADY * pl.col("usual"))
    if not unsteady.height or unsteady["count"].sum() * 2 < groups["count"].sum():
        return
    worst = unsteady.sort("over", descending=True).row(0, named=True)
    yield Finding(
        f"operators of one shape take {worst['slow'] / worst['usual']:.1f} times their usual time: threads compete "
        "for processors",
        int(unsteady["over"].sum()),
        "low",
        "give each rank its own cores: OMP_NUM_THREADS = cores / ranks, torch.set_num_threads, numactl or "
        "torchrun's CPU binding; count the data loader's workers too",
        int(unsteady["count"].sum()),
        name=worst["name"],
    )
