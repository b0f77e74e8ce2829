"""Build Chakra nodes from a trace of pipeline operations (forward, backward, send, receive) with message sizes.

Operations of a rank run one after the other. An operation waits for the message of its micro-batch, a message is sent
after the operation that it comes from, and a receive is posted after the operation that runs before it: it takes the
time until the message arrives, so that a replay without a network waits as the recording did. The time between the end
of what an operation waits for and its start is added to the operation; a simulator replaces the time of messages by
that of its network. The rest of a step, with its collectives, is a computation.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core.trace import Trace
from etloom.formats.chakra.protobuf import TYPE_NUMBERS
from etloom.formats.chakra.writing import NODE_SCHEMA, NodeTable

_TYPES = {"send": TYPE_NUMBERS["COMM_SEND_NODE"], "recv": TYPE_NUMBERS["COMM_RECV_NODE"]}
_PLACE = pl.Struct({"step": pl.Int64, "micro_batch": pl.Int64, "chunk": pl.Int64})


def has_message_sizes(trace: Trace) -> bool:
    """Return whether all sends and receives of a pipeline operation trace have a known size and peer rank."""
    comms = trace.comms.filter(pl.col("collective").is_not_null())
    return comms.select(pl.col("bytes", "peer").is_not_null().all()).transpose().to_series().all()


def build_pipeline_nodes(trace: Trace) -> NodeTable:
    """Build the Chakra nodes of one rank from its pipeline operations: forward, backward, send and receive."""
    rank = int(trace.rank or 0)
    described = trace.comms.select(pl.col("event").alias("id"), "peer", "bytes")
    rows = trace.events.join(described, on="id", how="left", maintain_order="left")
    rows = rows.with_columns(
        pl.col("name").cast(pl.String), pl.col("args").cast(pl.String).str.json_decode(_PLACE)
    )
    # A message is sent after an operation that ends at the same moment, and arrives before the one that waits for it.
    order = pl.col("name").str.extract(r"-(\w+)$").replace_strict({"recv": 0, "send": 2}, default=1)
    rows = rows.sort("ts", order, "id")
    origin = min(0, int(rows["ts"].min() or 0))  # type: ignore[arg-type]
    nodes: list[dict[str, object]] = []
    dependencies: list[list[int]] = []
    computed: dict[tuple[object, ...], tuple[int, int]] = {}  # operation -> its node and end
    arrived: dict[tuple[object, ...], tuple[int, int]] = {}
    previous: tuple[int, int] | None = None
    tags: dict[tuple[int, int], int] = {}
    for number, row in enumerate(rows.iter_rows(named=True), 1):
        direction, _, action = row["name"].partition("-")
        key = (direction, *(row["args"] or {}).values())
        start, end, after = row["ts"], row["ts"] + row["dur"], []
        node: dict[str, object] = {"type": TYPE_NUMBERS["COMP_NODE"]}
        if action in _TYPES:
            ends = (rank, row["peer"]) if action == "send" else (row["peer"], rank)
            tags[ends] = tags.get(ends, -1) + 1
            node = {"type": _TYPES[action], "comm_src": ends[0], "comm_dst": ends[1], "comm_tag": tags[ends]}
            node |= {"comm_size": row["bytes"], "collective": action}
            if action == "send":
                after = [computed[key]] if key in computed else []
            else:
                after = [] if previous is None else [previous]
                start = previous[1] if previous is not None else origin
                end = max(start, end)
                arrived[key] = (number, end)
        else:
            after = [item for item in (previous, arrived.get(key)) if item is not None]
            start = max((moment for _, moment in after), default=origin)
            previous = computed[key] = (number, end)
        node |= {"id": number, "name": row["name"], "cat": row["cat"], "is_cpu_op": False}
        node |= {"start_ns": row["ts"], "duration_ns": row["dur"]}
        first_us, last_us = ((moment - origin) // 1000 for moment in (start, end))
        node |= {"start_time_micros": first_us, "duration_micros": last_us - first_us}
        nodes.append(node)
        dependencies.append(sorted(item for item, _ in after))
    first = np.cumsum([0, *map(len, dependencies)], dtype=np.int64)
    flat = np.array([item for items in dependencies for item in items], np.int64)
    return NodeTable(pl.DataFrame(nodes, schema=NODE_SCHEMA), first, flat)
