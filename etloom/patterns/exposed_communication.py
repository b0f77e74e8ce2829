"""Communication that no computation hides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from etloom.collectives import together
from etloom.intervals import Intervals
from etloom.patterns._finding import Finding
from etloom.patterns._view import View
from etloom.trace import Job

SCOPE = "job"


def find(views: Mapping[int, View]) -> Iterator[tuple[int, Finding]]:
    waits = _waits(views)
    for rank, view in views.items():
        for finding in _of_rank(view, waits.get(rank)):
            yield rank, finding


def _waits(views: Mapping[int, View]) -> dict[int, Intervals]:
    """When each rank stood in a communication before the last one had come, on its own clock."""
    if len(views) < 2:
        return {}
    parts = together(Job({rank: view.trace for rank, view in views.items()})).comparable
    arrival = pl.col("start").max().over("meeting")
    waited = (
        parts.filter(pl.col("meeting").is_not_null())
        .with_columns(until=pl.col("own_start") + arrival - pl.col("start"))
        .filter(pl.col("until") - pl.col("own_start") > pl.col("error"))
    )
    return {
        rank: Intervals.of(own["own_start"], pl.Series(own.select(pl.min_horizontal("until", "own_end"))))
        for (rank,), own in waited.group_by("rank")
    }


def _of_rank(view: View, waits: Intervals | None) -> Iterator[Finding]:
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
    waited = (exposed & waits).total if waits else 0
    late = f", {waited / 1e6:,.2f} ms of it waiting for ranks that come later" if waited else ""
    yield Finding(
        f"{hidden:.0f} % of the communication is hidden behind computation; during the rest none runs{late}; it "
        "costs as much where nothing else holds the job up (etloom simulate --set 'comm x0')",
        exposed.total,
        "medium",
        "issue collectives earlier and on their own stream (gradient buckets during backward, FSDP prefetch), make "
        "buckets or messages larger; what waits for a late rank is gained by mending that one, see stragglers",
        int((cost > 0).sum()),
        step=worst.get("step"),
        stream=worst.get("stream"),
        name=worst.get("name"),
        event=worst.get("launch"),
        in_steps_ns=(exposed & view.stepped).total,
    )
