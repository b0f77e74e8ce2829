"""Communication that no computation hides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.rank_view import View
from etloom.core.intervals import Intervals

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    times = view.activity.times
    exposed = times["communication"] - times["computation"]
    if not exposed.total:
        return
    waits = view.awaiting
    hidden = 100 * (1 - exposed.total / times["communication"].total)
    aside = "; waiting for late ranks is left out" if waits.total else ""
    moves = (
        f"{hidden:.0f} % of the communication is hidden behind computation; during the rest none runs, which costs as "
        f"much where nothing else holds the job up (etloom simulate --set 'comm x0'){aside}"
    )
    earlier = (
        "issue collectives earlier and on their own stream (gradient buckets during backward, FSDP prefetch), make "
        "buckets or messages larger"
    )
    waiting = "the rank stands in communication and computes nothing while ranks that come later are awaited"
    evener = (
        "`etloom analyze stragglers` says who comes late and why, `imbalance` how unevenly the work is shared"
    )
    yield from _costing(view, exposed - waits, moves, earlier, "transfer")
    yield from _costing(view, exposed & waits, waiting, evener, "wait")


def _costing(view: View, lost: Intervals, title: str, advice: str, place: str) -> Iterator[Finding]:
    if not lost.total:
        return
    communication = view.activity.times["communication"]
    starts, ends = communication.starts, communication.ends
    if view.activity.basis == "device":
        work = view.work.filter(pl.col("kind") == "communication")
        starts, ends = work["ts"].to_numpy(), work["end"].to_numpy()
    cost = lost.covered(starts, ends)
    at = int(cost.argmax())
    worst: dict[str, Any] = {"step": view.step_at(int(starts[at]))}
    if view.activity.basis == "device":
        worst = work.row(at, named=True)
    yield Finding(
        title,
        lost.total,
        "medium",
        advice,
        int((cost > 0).sum()),
        step=worst.get("step"),
        stream=worst.get("stream"),
        name=worst.get("name"),
        event=worst.get("launch"),
        in_steps_ns=(lost & view.stepped).total,
        place=place,
    )
