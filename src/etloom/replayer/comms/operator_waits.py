"""Places the wait for each communication call before the first operator that started after the call had ended.

A recorded wait stays where it was. Any other wait stays between two calls: the last one that was made while the awaited
call was in flight, and the next one. So calls wait for each other as they do without operators, and no deadlock can
arise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from etloom.core.trace import Trace
from etloom.replayer.plan import Call
from etloom.replayer.recorded_calls import RecordedCall
from etloom.timeline.activity import has_device_events, select_launched_events


@dataclass(frozen=True)
class NodeStarts:
    """Start times (ns) of execution-trace nodes: of their GPU work, or without GPU work of their host operators.

    Attributes:
        nodes: Node ids, ascending.
        starts: Start times in ns: of the GPU work if the operator launched any, else of the operator on the host.
    """

    nodes: np.ndarray
    starts: np.ndarray

    def find_first(self, time: int, after: int, before: int | None) -> int | None:
        """Return the first node between ids ``after`` and ``before`` that started at ``time`` (ns) or later."""
        low = int(np.searchsorted(self.nodes, after, "right"))
        high = len(self.nodes) if before is None else int(np.searchsorted(self.nodes, before))
        later = np.flatnonzero(self.starts[low:high] >= time)
        return int(self.nodes[low + later[0]]) if len(later) else None


def node_starts(trace: Trace) -> NodeStarts:
    """Return the start times (ns) of a linked trace's nodes: of their GPU work or, in CPU-only traces, on the host.

    The host runs ahead of the GPU, so GPU work counts with its own time, for the outermost operator that launched it.
    """
    event_nodes = trace.links.select("event", node=pl.col("node").cast(pl.Int64)).unique("node", keep="first")
    if has_device_events(trace):
        launched = select_launched_events(trace, "ts", "operator").drop_nulls("operator")
        outermost = pl.DataFrame(
            list(_outermost_operators(trace).items()),
            schema={"node": pl.Int64, "top": pl.Int64},
            orient="row",
        )
        starts = (
            launched.with_columns(pl.col("operator").cast(pl.Int64))
            .join(event_nodes.with_columns(operator=pl.col("event").cast(pl.Int64)), on="operator")
            .join(outermost, on="node")
            .group_by(node="top")
            .agg(start=pl.col("ts").min())
        )
    else:
        starts = event_nodes.join(trace.events.select(start="ts", event="id"), on="event")
    starts = starts.drop_nulls("start").sort("node")
    return NodeStarts(starts["node"].to_numpy(), starts["start"].to_numpy())


def _outermost_operators(trace: Trace) -> Mapping[int, int]:
    """Return node -> its outermost enclosing operator, reached through parents that are all operators."""
    tops: dict[int, int] = {}
    operator_tops: dict[int, int] = {}
    nodes = trace.nodes.select("id", "parent", is_operator=pl.col("op_schema").is_not_null()).sort("id")
    for node, parent, is_operator in nodes.iter_rows():
        tops[node] = operator_tops.get(parent, node) if is_operator else node
        if is_operator:
            operator_tops[node] = tops[node]
    return tops


def place_waits(
    calls: Sequence[Call], recorded_calls: Sequence[RecordedCall], starts: NodeStarts
) -> list[Call]:
    """Set for each call the operator (node) before which the replay waits for its completion (`Call.wait_before_node`).

    That is where its wait was recorded, else the first operator that started after the call had ended. A call that was
    not asynchronous and has no times is waited for at once; otherwise nothing is known and the field stays None.

    Args:
        calls: The calls of a rank.
        recorded_calls: The recorded calls they were mapped from.
        starts: Start times of the rank's operators.
    """
    nodes = [call.node for call in calls if call.node is not None]
    if len(nodes) < len(calls):
        return list(calls)
    waiting_call = {earlier: call.index for call in calls for earlier in call.waits_for}
    wait_node: dict[int, int | None] = {}
    for node, call, recorded in zip(nodes, calls, recorded_calls, strict=True):
        end = waiting_call.get(call.index, len(nodes))
        before = nodes[end] if end < len(nodes) else None
        if recorded.waited_at is not None and recorded.waited_at > node:
            # Calls of one stream follow each other there, even if the host waited for none of them.
            wait_node[call.index] = recorded.waited_at
            waiting_call[call.index] = bisect_left(nodes, recorded.waited_at)
        elif recorded.end is not None:
            wait_node[call.index] = starts.find_first(recorded.end, nodes[end - 1], before)
        elif recorded.is_async is False and recorded.seq is None and end == call.index + 1:
            wait_node[call.index] = node + 1
    waits_for: dict[int, list[int]] = {}
    for earlier, later in sorted(waiting_call.items()):
        waits_for.setdefault(later, []).append(earlier)
    return [
        replace(
            call,
            wait_before_node=wait_node.get(call.index),
            waits_for=tuple(waits_for.get(call.index, ())),
        )
        for call in calls
    ]
