"""Memcpys that overlap neither computation nor communication."""

from __future__ import annotations

import re
from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.core.text import count_noun
from etloom.timeline.activity import to_intervals

COPY = r"(?i)memcpy|copy(?:Host|Device|Buffer)"
TO_DEVICE = r"(?i)HtoD|HostToDevice"
PAGEABLE = r"(?i)pageable"
"""Pageable copies to the device are reported by host-copies."""

INSIDE_DEVICE = re.compile(r"(?i)DtoD|DeviceToDevice")
TO_HOST = re.compile(r"(?i)DtoH|DeviceToHost")
ON_DEVICE_ADVICE = (
    "write the result directly to its destination (out=, views, in-place operators), and remove clones that are not "
    "needed"
)
TO_DEVICE_ADVICE = (
    "keep reused data on the device; copy the next part during the current computation, from pinned memory, with "
    "non_blocking=True on a separate stream; copy less (a narrower type, a part)"
)

FROM_DEVICE_ADVICE = (
    "keep data on the device if it is used there, copy back less, less often, to pinned memory with "
    "non_blocking=True on a separate stream, and wait only where the host needs the data"
)

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    times = view.activity.times
    columns = ("name", "ts", "end", "dur", "step", "stream", "launch")
    copies = view.activities.select(columns).filter(view.activities["kind"] == "memory")
    to_device = view.match_activities(copies, TO_DEVICE) & view.match_activities(copies, PAGEABLE)
    copies = copies.filter(view.match_activities(copies, COPY) & ~to_device)
    for (name,), group in copies.group_by("name", maintain_order=True):
        lost = to_intervals(group) - times["computation"] - times["communication"]
        if not lost.total:
            continue
        alone = lost.covered(group["ts"], group["end"])
        times_alone = int((alone > 0).sum())
        worst = group.row(int(alone.argmax()), named=True)
        location = view.locate(pl.Series([worst["launch"]], dtype=pl.UInt32)).row(0, named=True)
        yield Finding(
            f"{count_noun(times_alone, 'copy', 'copies')} without concurrent computation or communication: {name}",
            lost.total,
            "medium",
            _advise(str(name)),
            times_alone,
            step=worst["step"],
            stream=worst["stream"],
            name=str(name),
            event=worst["launch"],
            in_steps_ns=(lost & view.step_intervals).total,
            place=str(name),
            **location,
        )


def _advise(name: str) -> str:
    """Return the advice for a kind of copy, given its name."""
    if INSIDE_DEVICE.search(name):
        return ON_DEVICE_ADVICE
    return FROM_DEVICE_ADVICE if TO_HOST.search(name) else TO_DEVICE_ADVICE
