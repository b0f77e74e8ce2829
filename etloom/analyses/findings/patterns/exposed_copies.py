"""Copies beside which nothing computes or communicates."""

from __future__ import annotations

import re
from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, counted
from etloom.analyses.findings.rank_view import View
from etloom.timeline.activity import to_intervals

COPY = r"(?i)memcpy|copy(?:Host|Device|Buffer)"
TO_DEVICE = r"(?i)HtoD|HostToDevice"
PAGEABLE = r"(?i)pageable"
"""Such copies to the device are host-copies' matter."""

INSIDE_DEVICE = re.compile(r"(?i)DtoD|DeviceToDevice")
TO_HOST = re.compile(r"(?i)DtoH|DeviceToHost")
INSIDE = (
    "write the result where it belongs instead of copying it there (out=, views, in-place operators), and drop clones "
    "that nobody needs"
)
ACROSS = (
    "keep on the device what is used again; copy the next part while this one is computed, from pinned memory, with "
    "non_blocking=True on a stream of its own; copy less (a narrower type, a part)"
)

BACK = (
    "keep on the device what is used there, and copy back less, less often; into pinned memory, with non_blocking=True "
    "on a stream of its own, and wait for it only where the host needs it"
)

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    times = view.activity.times
    columns = ("name", "ts", "end", "dur", "step", "stream", "launch")
    copies = view.work.select(columns).filter(view.work["kind"] == "memory")
    to_device = view.named(copies, TO_DEVICE) & view.named(copies, PAGEABLE)
    copies = copies.filter(view.named(copies, COPY) & ~to_device)
    for (name,), own in copies.group_by("name", maintain_order=True):
        lost = to_intervals(own) - times["computation"] - times["communication"]
        if not lost.total:
            continue
        alone = lost.covered(own["ts"], own["end"])
        times_alone = int((alone > 0).sum())
        worst = own.row(int(alone.argmax()), named=True)
        where = view.where(pl.Series([worst["launch"]], dtype=pl.UInt32)).row(0, named=True)
        yield Finding(
            f"nothing runs beside {counted(times_alone, 'copy', 'copies')}: {name}",
            lost.total,
            "medium",
            INSIDE if INSIDE_DEVICE.search(str(name)) else BACK if TO_HOST.search(str(name)) else ACROSS,
            times_alone,
            step=worst["step"],
            stream=worst["stream"],
            name=str(name),
            event=worst["launch"],
            in_steps_ns=(lost & view.stepped).total,
            place=str(name),
            **where,
        )
