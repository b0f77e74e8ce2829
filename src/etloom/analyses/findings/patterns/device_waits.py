"""Find time in which the device is idle although the next work was launched in time or its launch was not recorded.

Gaps between kernels in three cases: the next kernel was launched in time; its launch was not recorded; or the
gap lasts more than 50 µs after a late launch returned.

Cost: the gaps.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import (
    BOTH,
    Finding,
    describe_long_gaps,
    describe_place,
    format_times,
    sum_places,
)
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    gaps = view.select_gaps("device")
    is_launched = gaps["event"].is_not_null()
    yield from sum_places(
        view,
        gaps.filter(is_launched),
        lambda row: (
            f"the device is idle {format_times(row['count'])}{describe_place(row, 'block')} although the next kernel "
            f"is already launched{describe_long_gaps(row)}"
        ),
        confidence="low",
        advice="about 1 µs between kernels is normal; longer gaps are streams that wait for each other (see "
        "critical-path), very short kernels (use a CUDA graph or fusion), slow launches, or earlier GPU activity that "
        "was not recorded",
        tracks=BOTH,
        by="block",
    )
    yield from sum_places(
        view,
        gaps.filter(~is_launched),
        lambda row: (
            f"the device is idle {format_times(row['count'])} before work whose launch was not recorded"
            f"{describe_long_gaps(row)}"
        ),
        confidence="low",
        advice="record the host too (torch.profiler with CPU and CUDA activities), complete and not filtered: the "
        "cause of the gaps is not in this trace",
        tracks=BOTH,
        by="name",
        kind="launch not recorded",
    )
