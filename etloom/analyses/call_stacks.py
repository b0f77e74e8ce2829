"""Who calls what on each thread: a tree of calls with counts, host and device time.

A row is all calls of one name at one place (node), below its caller (parent, null at the top of a thread). Callers
stand before what they call, and what takes longest first. All steps count together, as ProfilerStep#*. total: self
time of the calls and of all they call; self: without what they call. device: of the kernels, copies and sets launched
in them or in what they call, self_device without the latter; null where the trace holds no device work, as is their
number. Work whose launch was not recorded is of no thread, in a row of its own.

joined: put each backward operator under the forward one that it belongs to, whatever thread it ran on, so that a
module or operator shows all it costs. kernels: device work has rows of its own, below the call that launched it.
depth: only calls so deep and less, 0 the outermost. least_pct: only what takes this share of all host or of all device
time; 0 for every call.

Units: ns, percent. Definition: HolisticTraceAnalysis' call stacks, one tree for host and device. A single call's own
caller and depth are in the events table (etloom query); etloom export --to folded writes stacks for a flame graph.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import conform_columns, require_linked
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, has_device_events
from etloom.timeline.call_tree import SCHEMA, build_call_tree

SCOPE = "rank"
COLUMNS = SCHEMA
_DEVICE = ("device_ns", "self_device_ns", "kernels")


def analyze(
    trace: Trace,
    *,
    joined: bool = False,
    kernels: bool = False,
    depth: int | None = None,
    least_pct: float = 1.0,
) -> pl.DataFrame:
    require_linked(trace)
    if not 0 <= least_pct <= 100:
        raise AnalysisError(f"{least_pct} is no share", remedy="it is 0 to 100", option="least_pct")
    tree = build_call_tree(trace, joined=joined, kernels=kernels)
    if not tree.height:
        raise AnalysisError(
            "the trace holds no calls on any thread",
            where=describe_rank(trace),
            remedy="record it with torch.profiler and its CPU activity",
        )
    if least_pct:
        host, device = (
            (pl.col(whole).sum() > 0) & (100 * pl.col(part) >= least_pct * pl.col(whole).sum())
            for part, whole in (("total_ns", "self_ns"), ("device_ns", "self_device_ns"))
        )
        tree = tree.filter(host | device)
    if depth is not None:
        tree = tree.filter(pl.col("depth") <= depth)
    if not has_device_events(trace):
        tree = tree.with_columns(pl.lit(None, pl.Int64).alias(name) for name in _DEVICE)
    return conform_columns(tree, COLUMNS)
