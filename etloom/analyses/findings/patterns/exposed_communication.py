"""Communication that does not overlap computation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    times = view.activity.times
    exposed = times["communication"] - times["computation"]
    if not exposed.total:
        return
    waits = view.waiting_for_ranks
    hidden = 100 * (1 - exposed.total / times["communication"].total)
    excluded = "; waiting for late ranks is reported separately" if waits.total else ""
    transfer_title = (
        f"{hidden:.0f} % of communication overlaps computation; hiding the rest would save up to "
        f"{(exposed - waits).total / 1e6:,.1f} ms{excluded}"
    )
    transfer_advice = (
        "issue collectives earlier and on a separate stream (gradient buckets during backward, FSDP prefetch), use "
        "larger buckets or messages; estimate the gain with etloom simulate --set 'comm x0'"
    )
    wait_title = "the rank is blocked in communication, without computation, until late ranks arrive"
    wait_advice = (
        "`etloom analyze stragglers` shows which ranks arrive late and why, `imbalance` how unevenly the work is "
        "distributed"
    )
    yield from _make_finding(view, exposed - waits, transfer_title, transfer_advice, "transfer")
    yield from _make_finding(view, exposed & waits, wait_title, wait_advice, "wait")


def _make_finding(view: RankView, lost: Intervals, title: str, advice: str, place: str) -> Iterator[Finding]:
    if not lost.total:
        return
    communication = view.activity.times["communication"]
    starts, ends = communication.starts, communication.ends
    if view.activity.basis == "device":
        work = view.activities.filter(pl.col("kind") == "communication")
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
        in_steps_ns=(lost & view.step_intervals).total,
        place=place,
    )
