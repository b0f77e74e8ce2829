"""The device is idle while the host waits for the next batch."""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals
from etloom.core.text import count_noun

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    loads = view.data_loads
    span = view.busy.span
    if not loads.height or span is None:
        return
    idle = Intervals.of([span[0]], [span[1]]) - view.busy
    lost = idle & view.data_loading
    if cost := lost.total:
        longest = loads.sort("dur", descending=True, maintain_order=True).row(0, named=True)
        yield Finding(
            f"nothing else runs while the host waits for the data loader ({count_noun(loads.height, 'load')})",
            cost,
            "high",
            "increase num_workers and prefetch_factor, enable persistent_workers and pin_memory, or move the "
            "preprocessing into the workers",
            loads.height,
            step=longest["step"],
            name=longest["name"],
            event=longest["id"],
            in_steps_ns=(lost & view.step_intervals).total,
        )
