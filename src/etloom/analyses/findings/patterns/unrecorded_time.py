"""State the time for which the recording does not show whether the device worked: it is neither idle nor busy.

Time that is neither idle nor busy: before the first activity if that started more than 50 µs after its
launch, inside a blocking copy right thereafter, and after the last activity once launch calls have no
recorded activity.

Cost: that time; it comes after all other findings.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from etloom.analyses.findings.finding import BOTH, Finding, sum_places
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    for finding in sum_places(
        view,
        view.select_gaps("unrecorded"),
        lambda row: (
            f"unknown, not idle: for {row['cost_ns'] / 1e6:,.1f} ms the recording does not show what the device did "
            "(before its first recorded work, in copies that waited for earlier work, or after its last)"
        ),
        confidence="low",
        advice="start the recording earlier, or end it after torch.cuda.synchronize(), if this time matters",
        tracks=BOTH,
        by="name",
    ):
        yield replace(finding, is_artifact=True)
