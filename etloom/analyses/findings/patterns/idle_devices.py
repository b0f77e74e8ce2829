"""Some devices of a rank stand still while others of it work."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.rank_view import View
from etloom.core.intervals import union
from etloom.timeline.activity import to_intervals

STRAY = 0.01
"""A device that works for a smaller share of the time was not meant to: a context that was opened by mistake."""

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    if view.work["device"].drop_nulls().n_unique() < 2:
        return
    known = view.work.drop_nulls("device")
    busy = {
        int(device): to_intervals(own) for (device,), own in known.group_by("device", maintain_order=True)
    }
    least = STRAY * union(busy.values()).total
    busy = {device: time for device, time in busy.items() if time.total > least}
    if len(busy) < 2:
        return
    anywhere = union(busy.values())
    # As much work, at all times on all of them.
    evenly = sum(time.total for time in busy.values()) / len(busy)
    if not (cost := round(anywhere.total - evenly)):
        return
    device = min(busy, key=lambda one: (busy[one].total, one))
    share = busy[device].total / anywhere.total
    marked = anywhere & view.stepped
    in_steps = marked.total - sum((time & view.stepped).total for time in busy.values()) / len(busy)
    first = known.filter(pl.col("device") == device).row(0, named=True)
    yield Finding(
        f"of the {len(busy)} devices of the rank, device {device} works for {100 * share:.0f} % of the time in which "
        "any does",
        cost,
        "low",
        "share the work evenly and at one time: a process a device (DistributedDataParallel) in place of one for all, "
        "more micro-batches in a pipeline. Elsewhere a rank counts as busy where any of its devices is",
        step=first["step"],
        stream=first["stream"],
        name=str(first["name"]),
        event=first["launch"],
        in_steps_ns=round(in_steps),
    )
