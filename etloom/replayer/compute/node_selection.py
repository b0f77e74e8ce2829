"""The nodes of a recording that a replay of computation takes, known before torch is imported, which takes seconds."""

from __future__ import annotations

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, find_step_nodes


def select_nodes(trace: Trace, step: int | None = None) -> pl.DataFrame:
    """The nodes of the execution trace, or of its step N. Raises EtloomError where there is none."""
    if not trace.nodes.height:
        raise EtloomError(
            "holds no execution trace, which computation replay needs",
            where=describe_rank(trace) or "the trace",
            remedy="record one: etloom collect, or ExecutionTraceObserver",
        )
    first, last = _step_node_range(trace.nodes, step)
    return trace.nodes.filter(pl.col("id").is_between(first, last, closed="left"))


def _step_node_range(nodes: pl.DataFrame, step: int | None) -> tuple[int, int]:
    """The ids of the nodes of a step: operators of all threads, since ids are given in order of time."""
    if step is None:
        return 0, 1 << 62
    found = find_step_nodes(nodes)
    start = found.filter(pl.col("step") == step)["id"]
    if not start.len():
        known = ", ".join(map(str, found["step"].to_list())) or "none"
        raise EtloomError(f"the execution trace has no step {step}", remedy=f"it has {known}")
    after = found.filter(pl.col("id") > start[0])["id"]
    return start[0], after[0] if after.len() else 1 << 62
