"""Where among the operators of a rank its calls are waited for: before the first that began after a call had ended.

A wait that was recorded stays where it was. Another is moved only between the last call that was made while the first
was in flight and the one after that: calls wait for each other as they do without operators, so that none can deadlock.
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
    """When the work of each node began, in ns: on the host, where a device did it there. nodes: ascending."""

    nodes: np.ndarray
    at: np.ndarray

    def first(self, since: int, after: int, before: int | None) -> int | None:
        """The first node of those between two that began since then."""
        low = int(np.searchsorted(self.nodes, after, "right"))
        high = len(self.nodes) if before is None else int(np.searchsorted(self.nodes, before))
        late = np.flatnonzero(self.at[low:high] >= since)
        return int(self.nodes[low + late[0]]) if len(late) else None


def node_starts(trace: Trace) -> NodeStarts:
    """Of a linked trace. The host runs ahead of a device, so of what a device does its own time counts, for the
    operator as a whole that launched it."""
    of_node = trace.links.select("event", node=pl.col("node").cast(pl.Int64)).unique("node", keep="first")
    if has_device_events(trace):
        work = select_launched_events(trace, "ts", "operator").drop_nulls("operator")
        whole = pl.DataFrame(
            list(_outermost_operators(trace).items()),
            schema={"node": pl.Int64, "top": pl.Int64},
            orient="row",
        )
        found = (
            work.with_columns(pl.col("operator").cast(pl.Int64))
            .join(of_node.with_columns(operator=pl.col("event").cast(pl.Int64)), on="operator")
            .join(whole, on="node")
            .group_by(node="top")
            .agg(start=pl.col("ts").min())
        )
    else:
        found = of_node.join(trace.events.select(start="ts", event="id"), on="event")
    found = found.drop_nulls("start").sort("node")
    return NodeStarts(found["node"].to_numpy(), found["start"].to_numpy())


def _outermost_operators(trace: Trace) -> Mapping[int, int]:
    """Node -> the outermost operator around it, of which all between are operators."""
    found: dict[int, int] = {}
    operator = trace.nodes.select("id", "parent", is_one=pl.col("op_schema").is_not_null()).sort("id")
    tops: dict[int, int] = {}
    for node, parent, is_one in operator.iter_rows():
        found[node] = tops.get(parent, node) if is_one else node
        if is_one:
            tops[node] = found[node]
    return found


def place_waits(calls: Sequence[Call], rows: Sequence[RecordedCall], times: NodeStarts) -> list[Call]:
    """The calls, mapped from these rows, with the node before which each is waited for: where a wait was recorded
    there, else by times; one that was not asynchronous and has none at once; of others nothing is known."""
    nodes = [call.node for call in calls if call.node is not None]
    if len(nodes) < len(calls):
        return list(calls)
    waits = {one: call.index for call in calls for one in call.after}
    until: dict[int, int | None] = {}
    for node, call, row in zip(nodes, calls, rows, strict=True):
        end = waits.get(call.index, len(nodes))
        before = nodes[end] if end < len(nodes) else None
        if row.waited_at is not None and row.waited_at > node:
            # Calls of one stream follow each other there, also where the host waited for none of them.
            until[call.index] = row.waited_at
            waits[call.index] = bisect_left(nodes, row.waited_at)
        elif row.end is not None:
            until[call.index] = times.first(row.end, nodes[end - 1], before)
        elif row.is_async is False and row.seq is None and end == call.index + 1:
            until[call.index] = node + 1
    after: dict[int, list[int]] = {}
    for one, at in sorted(waits.items()):
        after.setdefault(at, []).append(one)
    return [
        replace(call, until=until.get(call.index), after=tuple(after.get(call.index, ()))) for call in calls
    ]
