"""Copies beside which nothing computes or communicates."""

from __future__ import annotations

import re
from collections.abc import Iterator

import polars as pl

from etloom.activity import during
from etloom.patterns._finding import Finding, counted
from etloom.patterns._view import View, named

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
    copies = view.work.filter(pl.col("kind") == "memory")
    copies = copies.filter(named(copies, COPY) & ~(named(copies, TO_DEVICE) & named(copies, PAGEABLE)))
    for (name,), own in copies.group_by(pl.col("name").cast(pl.String), maintain_order=True):
        lost = during(own) - times["computation"] - times["communication"]
        if not lost.total:
            continue
        own = own.with_columns(pl.Series("alone", lost.covered(own["ts"], own["end"])))
        worst = own.sort("alone", descending=True, maintain_order=True).row(0, named=True)
        where = view.where(pl.Series([worst["launch"]], dtype=pl.UInt32)).row(0, named=True)
        yield Finding(
            f"nothing runs beside {counted(int((own['alone'] > 0).sum()), 'copy', 'copies')}: {name}",
            lost.total,
            "medium",
            INSIDE if INSIDE_DEVICE.search(str(name)) else BACK if TO_HOST.search(str(name)) else ACROSS,
            int((own["alone"] > 0).sum()),
            step=worst["step"],
            stream=worst["stream"],
            name=str(name),
            event=worst["launch"],
            in_steps_ns=(lost & view.stepped).total,
            place=str(name),
            **where,
        )
