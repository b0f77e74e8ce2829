"""Find time in which the device is idle because the host waited for it and had nothing else queued.

Calls that wait for the device, after which it waits for the host; not calls that begin when the device has
been idle for 50 µs, nor those in a compilation or capture.

Cost: the gaps after them, at most the time for which the calls blocked.
Confidence: high.
"""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import BOTH, Finding, describe_place, format_times, sum_places
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    yield from sum_places(
        view,
        view.select_gaps("sync"),
        lambda row: (
            f"the host waits for the device{describe_place(row, 'call')} {format_times(row['count'])}; afterwards the "
            "device waits for the host"
        ),
        confidence="high",
        advice="keep the value on the device: log it later or copy it with non_blocking=True; .item(), .cpu(), "
        "nonzero, boolean masks, printing a tensor, torch.cuda.synchronize() and torch.cuda.empty_cache() all wait",
        tracks=BOTH,
        by="call",
    )
