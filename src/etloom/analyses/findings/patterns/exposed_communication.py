"""Find communication that does not overlap computation.

Communication during which no computation runs; not the time until late ranks arrive (see stragglers) and the
collectives of small-collectives. Also on runs without a GPU.

Cost: that time; the job gains at most what it would if transfers took no time.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import BOTH, DEVICE, Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.collectives import list_participations
from etloom.core.intervals import Intervals, union
from etloom.timeline.activity import select_host_calls

SCOPE = "rank"
NEEDS_OTHER_RANKS = True
LIMITED_BY_TRANSFERS = True
"""The job gains at most what it would if all transfers of data took no time."""


_SMALL_BYTES = 1 << 16
"""Transfers of fewer bytes take the latency of a call, whatever the bandwidth."""
_ADVICE = (
    "issue collectives earlier and on a separate stream (gradient buckets during backward, FSDP prefetch), use "
    "larger buckets or messages; estimate other networks with etloom simulate --bandwidth"
)
_SMALL_ADVICE = (
    "combine the collectives or leave some out: most move less than 64 KiB, so they take latency, not bandwidth; on a "
    "host without a GPU also give the backend's threads processors of their own"
)


def find(view: RankView) -> Iterator[Finding]:
    times, waits = view.activity.times, view.waiting_for_ranks
    exposed = times["communication"] - times["computation"]
    small = union(finding.lost for finding in view.find("small-collectives"))
    lost = exposed - waits - small
    if view.window:
        lost = lost.clip(*view.window)
    if not lost.total:
        return
    hidden = 100 * (1 - exposed.total / times["communication"].total)
    title = f"{hidden:.0f} % of communication overlaps computation; the rest is exposed"
    if waits.total:
        title += " (without the time until late ranks arrive, which is in stragglers)"
    if small.total:
        title += " (without what small-collectives counts)"
    calls = view.compute_once(list_communication)
    cost = lost.covered(calls["ts"], calls["end"])
    worst = calls.row(int(cost.argmax()), named=True)
    start_ns, end_ns = (lost & Intervals.of([worst["ts"]], [worst["end"]])).span or (None, None)
    yield Finding(
        title,
        lost.total,
        "medium",
        _SMALL_ADVICE if _are_small(view) else _ADVICE,
        lost,
        DEVICE if view.activity.basis == "device" else BOTH,
        int((cost > 0).sum()),
        step=worst["step"],
        stream=worst.get("stream"),
        name=worst["name"],
        event=worst["event"],
        start_ns=start_ns,
        end_ns=end_ns,
        in_steps_ns=(lost & view.step_intervals).total,
    )


def _are_small(view: RankView) -> bool:
    """Return whether most communications are known to move few bytes."""
    sizes = view.trace.compute_once(list_participations, view.trace.rank or 0)["bytes"]
    return 2 * int((sizes < _SMALL_BYTES).sum()) > len(sizes)


def list_communication(view: RankView) -> pl.DataFrame:
    """Return the communications of a rank: ts, end, step, name, event (the host event to look at); stream on a
    device."""
    is_communication = pl.col("kind") == "communication"
    if view.activity.basis == "device":
        work = view.activities.filter(is_communication)
        return work.select("ts", "end", "step", "stream", pl.col("name").cast(pl.String), event="launch")
    calls = select_host_calls(view.trace).filter(is_communication)
    return calls.select("ts", "name", end=pl.col("ts") + pl.col("dur"), event="id").with_columns(
        step=view.steps_at(calls["ts"])
    )


RANK_TABLES = (list_communication,)
"""Tables of a rank that do not depend on others."""
