"""Communication that no computation hides."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.patterns._finding import Finding
from etloom.patterns._view import View

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    times = view.activity.times
    exposed = times["communication"] - times["computation"]
    if not exposed.total:
        return
    hidden = 100 * (1 - exposed.total / times["communication"].total)
    if view.activity.basis == "device":
        work = view.work.filter(pl.col("kind") == "communication")
        cost = exposed.covered(work["ts"].to_numpy(), work["end"].to_numpy())
        worst = (
            work.with_columns(pl.Series("cost_ns", cost))
            .sort("cost_ns", descending=True, maintain_order=True)
            .row(0, named=True)
        )
    else:
        worst = {}
    yield Finding(
        f"{hidden:.0f} % of the communication is hidden behind computation; during the rest none runs, which costs as "
        "much where nothing else holds the job up (etloom simulate --set 'comm x0')",
        exposed.total,
        "medium",
        "issue collectives earlier and on their own stream (gradient buckets during backward, FSDP prefetch), make "
        "buckets or messages larger, and see stragglers: part of it may be waiting for a late rank",
        len(exposed),
        step=worst.get("step"),
        stream=worst.get("stream"),
        name=worst.get("name"),
    )
