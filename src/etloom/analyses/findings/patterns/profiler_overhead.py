"""Find time in which the profiler itself keeps the GPU idle, which does not occur without the profiler.

Tracer artefacts: the profiler works (buffers, instrumentation, start and stop) while the GPU idles.

Cost: that idle time.
Confidence: high.
"""

from __future__ import annotations

from collections.abc import Iterator

from etloom.analyses.findings.finding import HOST, Finding, format_times
from etloom.analyses.findings.rank_view import RankView

SCOPE = "rank"


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis != "device" or view.window is None:
        return
    both = view.profiler_work
    if not both.height:
        return
    lost = view.profiling & view.busy.gaps(*view.window)
    if not lost.total:
        return
    worst = both.row(both["dur"].arg_max() or 0, named=True)
    mostly = "mostly " if both["name"].n_unique() > 1 else ""
    yield Finding(
        f"tracer artefact: the GPU idles while the profiler works {format_times(both.height)} "
        f"({mostly}{worst['name']}); this time does not exist without profiling",
        lost.total,
        "high",
        "leave it out of comparisons; record fewer steps, or without stacks and shapes, to shrink it",
        lost,
        HOST,
        both.height,
        step=worst["step"],
        name=worst["name"],
        event=worst["id"],
        start_ns=worst["ts"],
        end_ns=worst["end"],
        in_steps_ns=(lost & view.step_intervals).total,
    )
