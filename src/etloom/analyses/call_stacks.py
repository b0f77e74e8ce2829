"""Call tree of each thread: call counts, host time and device time per call path.

One row per name and position in the tree (node); parent is the row of the caller, null at the top of a thread. Callers
precede their callees, and siblings are sorted by time, longest first. All steps are counted together, as
ProfilerStep#*. total_ns: self time of the calls and of everything they call; self_ns: without callees. device_ns: time
of the kernels, memcpys and memsets launched by the calls or their callees; self_device_ns: without callees; null if the
trace has no GPU activity, like the number of kernels. GPU activity whose launch was not recorded has a row of its own,
outside of all threads.

Units: ns, percent. Definition: HolisticTraceAnalysis' call stacks, as one tree for host and device. The caller and the
depth of a single call are in the events table (etloom query); etloom export --to folded writes stacks for a flame
graph.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import check_percentage, conform_columns, require_linked
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
    joined: Annotated[
        bool,
        "Attach each backward operator to the forward operator it belongs to, across threads, so that a "
        "module or operator includes its full cost.",
    ] = False,
    kernels: Annotated[bool, "Add rows for GPU activities, below the call that launched them."] = False,
    depth: Annotated[int | None, "Only calls up to this depth; 0 is the outermost."] = None,
    min_pct: Annotated[
        float,
        "Only calls with at least this share of the total host time or of the total device time; 0 shows "
        "every call.",
    ] = 1.0,
) -> pl.DataFrame:
    require_linked(trace)
    check_percentage(min_pct, "min_pct")
    tree = build_call_tree(trace, joined=joined, kernels=kernels)
    if not tree.height:
        raise AnalysisError(
            "the trace contains no calls on any thread",
            where=describe_rank(trace),
            remedy="record with torch.profiler and CPU activity",
        )
    if min_pct:
        host, device = (
            (pl.col(total).sum() > 0) & (100.0 * pl.col(column) >= min_pct * pl.col(total).sum())
            for column, total in (("total_ns", "self_ns"), ("device_ns", "self_device_ns"))
        )
        tree = tree.filter(host | device)
    if depth is not None:
        tree = tree.filter(pl.col("depth") <= depth)
    if not has_device_events(trace):
        tree = tree.with_columns(pl.lit(None, pl.Int64).alias(name) for name in _DEVICE)
    return conform_columns(tree, COLUMNS)
