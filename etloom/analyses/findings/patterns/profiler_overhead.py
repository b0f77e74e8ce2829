"""The profiler itself keeps the GPU idle; such time does not exist without it."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import HOST, Finding, format_times
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "rank"
_OVERHEAD = r"^(?:Activity Buffer|Buffer Flush|Instrumentation|CUPTI|Resource$)"
_PROFILER = (
    r"torch/(?:autograd/)?profiler(?:/profiler)?\.py\(\d+\): "
    r"(?:__enter__|__exit__|start|stop|step|prepare_trace|start_trace|stop_trace)$"
)


def find(view: RankView) -> Iterator[Finding]:
    if view.activity.basis != "device" or view.window is None:
        return
    ranges = view.find_host_events(_OVERHEAD, ("overhead",))
    frames = view.find_host_events(_PROFILER)
    both = pl.concat([ranges, frames]).sort("ts")
    if not both.height:
        return
    idle = view.busy.gaps(*view.window)
    lost = Intervals.of(both["ts"].to_numpy(), both["end"].to_numpy()) & idle
    if not lost.total:
        return
    worst = both.row(both["dur"].arg_max() or 0, named=True)
    yield Finding(
        f"tracer artefact: the GPU idles while the profiler works {format_times(both.height)} ({worst['name']}); this "
        "time does not exist without profiling",
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
