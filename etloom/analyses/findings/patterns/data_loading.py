"""The device is idle while the host waits for the next batch."""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import Finding, counted
from etloom.analyses.findings.rank_view import View
from etloom.core.intervals import Intervals

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    loads = view.loads
    span = view.busy.span
    if not loads.height or span is None:
        return
    idle = Intervals.of([span[0]], [span[1]]) - view.busy
    lost = idle & view.loading
    if cost := lost.total:
        longest = loads.sort("dur", descending=True, maintain_order=True).row(0, named=True)
        yield Finding(
            f"nothing runs while the host waits for the data loader, {counted(loads.height, 'load')}",
            cost,
            "high",
            "raise num_workers and prefetch_factor, keep persistent_workers on, pin memory, or move the work of the "
            "data set into the workers",
            loads.height,
            step=longest["step"],
            name=longest["name"],
            event=longest["id"],
            in_steps_ns=(lost & view.stepped).total,
        )
