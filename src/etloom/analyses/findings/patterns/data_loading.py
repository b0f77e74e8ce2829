"""Find time in which nothing else runs because the host waits for the data loader.

Waits for the data loader while nothing runs, also before the first kernel. Also on runs without a GPU.

Cost: that time.
Confidence: high.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from etloom.analyses.findings.finding import BOTH, Finding, describe_function, find_function
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals, union
from etloom.core.text import count_noun

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    loads = view.data_loads
    if not loads.height or view.window is None:
        return
    late = view.select_gaps("data").filter("is_late_effect")
    lost = union([view.data_loading - view.busy, Intervals.of(late["start"], late["end"])])
    if view.steps.height:
        lost = lost.clip(*view.window)
    if not lost.total:
        return
    alone = lost.covered(loads["ts"], loads["end"])
    longest = loads.row(int(alone.argmax()), named=True)
    finding = Finding(
        f"nothing else runs while the host waits for the data loader ({count_noun(int((alone > 0).sum()), 'load')})",
        min(lost.total, view.data_loading.total),  # what is longer has other causes, too
        "high",
        "increase num_workers and prefetch_factor, enable persistent_workers and pin_memory, or move the "
        "preprocessing into the workers",
        lost,
        BOTH,
        int((alone > 0).sum()),
        step=longest["step"],
        name=longest["name"],
        event=longest["id"],
        start_ns=longest["ts"],
        end_ns=longest["end"],
        in_steps_ns=min((lost & view.step_intervals).total, view.data_loading.total),
    )
    named = find_function(view, finding)
    yield (
        finding
        if named is None
        else replace(finding, title=f"{finding.title}: {describe_function(*named)}", frame=named[0])
    )
