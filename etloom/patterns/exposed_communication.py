"""Communication that no computation hides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
        starts, ends = work["ts"].to_numpy(), work["end"].to_numpy()
    else:
        starts, ends = times["communication"].starts, times["communication"].ends
    cost = exposed.covered(starts, ends)
    at = int(cost.argmax())
    worst: dict[str, Any] = {"step": view.step_at(int(starts[at]))}
    if view.activity.basis == "device":
        worst = work.row(at, named=True)
    yield Finding(
        f"{hidden:.0f} % of the communication is hidden behind computation; during the rest none runs, which costs as "
        "much where nothing else holds the job up (etloom simulate --set 'comm x0')",
        exposed.total,
        "medium",
        "issue collectives earlier and on their own stream (gradient buckets during backward, FSDP prefetch), make "
        "buckets or messages larger, and see stragglers: part of it may be waiting for a late rank",
        int((cost > 0).sum()),
        step=worst.get("step"),
        stream=worst.get("stream"),
        name=worst.get("name"),
        event=worst.get("launch"),
        in_steps_ns=(exposed & view.stepped).total,
    )
