"""Find time by which the device waits longer for the host in the first step than in later steps (warm-up).

Late launches in the first of three or more steps, if its host works at least 10 % longer than in any other.

Cost: the additional time.
Confidence: low.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import BOTH, Finding, sum_places
from etloom.analyses.findings.patterns.launch_bound import list_late_launches
from etloom.analyses.findings.rank_view import RankView
from etloom.core.text import count_noun

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    late = view.compute_once(list_late_launches).with_columns(cost_ns=pl.col("gap_ns") - pl.col("usual_ns"))
    yield from sum_places(
        view,
        late,
        lambda row: (
            f"the device waits longer for the host in the first step, {count_noun(row['count'], 'gap')}, than in the "
            "others: it is warm-up"
        ),
        confidence="low",
        advice="leave the first step out of comparisons: record after a few steps "
        "(torch.profiler.schedule(wait=..., warmup=...), etloom collect --steps 10:12)",
        tracks=BOTH,
        by="block",
    )
