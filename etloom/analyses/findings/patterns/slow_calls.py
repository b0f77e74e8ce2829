"""Find idle device time during a long runtime or driver call, which loads kernels or waits for a lock."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from etloom.analyses.findings.finding import BOTH, Finding, describe_place, format_times, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.arrays import take_rows

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    gaps = view.select_gaps("call").drop("name", "event")
    if gaps.is_empty():
        return
    # The call to look at is the last one that began before the gap's end.
    calls = view.long_calls.sort("ts")
    last = np.searchsorted(calls["ts"].to_numpy(), gaps["end"].to_numpy()) - 1
    gaps = gaps.with_columns(take_rows(calls["name"], last), event=take_rows(calls["id"], last))
    yield from sum_places(
        view,
        gaps,
        lambda row: (
            f"the device is idle {format_times(row['count'])} while the host is in a call of the runtime for 1 ms or "
            f"more{describe_place(row, 'name', ': ')}"
        ),
        confidence="medium",
        advice="first uses of kernels load their code: warm up with all shapes before the trace, or set "
        "CUDA_MODULE_LOADING=EAGER; else other threads or processes hold a lock of the driver",
        tracks=BOTH,
        by="name",
    )
