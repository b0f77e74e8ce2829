"""The activities of a linked trace as Chakra nodes: one table, a column a field or attribute."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.core import arrays, categories
from etloom.core.trace import Trace
from etloom.exports.chakra.activities import NO_OWNER, Activities, ActivityKind, build_activities
from etloom.exports.chakra.communication_nodes import TYPE_NUMBERS, build_communication_columns
from etloom.exports.chakra.group_numbering import GroupNumbers
from etloom.formats.execution_trace.node_json import NodeTexts as EtNodes
from etloom.graphs import build_graph
from etloom.graphs.algorithms import Int64Array
from etloom.graphs.event_arrays import rows_of_ids

GROUP_INIT_NAME = "## process_group:init ##"


@dataclass(frozen=True, eq=False)
class ChakraNodes:
    """``table``: a row a node, in the order of ids, which count from 1. ``first``, ``on``: row i depends on the
    nodes with the ids on[first[i]:first[i + 1]], all lower than its own."""

    table: pl.DataFrame
    first: Int64Array
    on: Int64Array


def build_nodes(trace: Trace, groups: GroupNumbers, *, delays: bool) -> ChakraNodes:
    """The nodes of a linked trace of one rank."""
    found = _build_activities(trace, delays)
    init = _format_groups(trace, groups)
    before = 1 if init is None else 2  # the id of the first activity
    table = pl.DataFrame(
        {
            "id": np.arange(before, before + len(found)),
            "ctrl": _control_dependencies(trace, found, before),
            "start_time_micros": found.start - min(0, int(found.start.min(initial=0))),
            "duration_micros": found.duration,
            "is_cpu_op": np.isin(found.kind, (ActivityKind.HOST, ActivityKind.WAIT)),
            "part": pl.Series(found.part).replace(0, None),
            "start_ns": found.start_ns,
            "duration_ns": found.end_ns - found.start_ns,
        }
    )
    table = table.hstack(_describe_activities(trace, found)).hstack(
        build_communication_columns(trace, found, groups)
    )
    first, on = found.first, found.dependencies + before
    if init is not None:
        row = pl.DataFrame(
            {
                "id": [1],
                "name": [GROUP_INIT_NAME],
                "type": [TYPE_NUMBERS["METADATA_NODE"]],
                "is_cpu_op": [True],
            }
            | {
                "start_time_micros": [0],
                "duration_micros": [0],
                "values_in": [init],
                "types_in": ["['String']"],
            }
        )
        table = pl.concat([row, table], how="diagonal_relaxed")
        first = np.append(0, first)
    return ChakraNodes(table, first, on)


def _build_activities(trace: Trace, delays: bool) -> Activities:
    events, graph = trace.events, build_graph(trace).graph
    parent = rows_of_ids(events, events["parent"])
    nodes = arrays.is_in(events["cat"], categories.OPERATOR_CATEGORIES | categories.ANNOTATION_CATEGORIES)
    calls = arrays.is_in(events["cat"], categories.RUNTIME_CATEGORIES)
    owner = rows_of_ids(events, _nullable_ids(graph.owner))
    around = arrays.find_nearest_ancestor(parent, nodes, owner)
    # A call outside of all operators stands for itself.
    own = (around < 0) & (owner >= 0) & np.append(calls, False)[owner]
    row = rows_of_ids(events, _nullable_ids(graph.event)).astype(np.int64)
    return build_activities(graph, row, np.where(own, owner, around), delays=delays)


def _nullable_ids(numbers: np.ndarray) -> pl.Series:
    return pl.Series(numbers).replace(-1, None)


def _control_dependencies(trace: Trace, found: Activities, before: int) -> pl.Series:
    """Control dependencies: of a part on the first of its operator, of that on the operator around it; of device
    work and ranges on the activity that issued them."""
    events = trace.events
    host = found.kind <= ActivityKind.WAIT
    first = np.full(events.height + 1, -1, np.int64)  # so that first[-1] is -1
    opens = np.flatnonzero(host & (found.part == 0) & (found.owner != NO_OWNER))
    first[found.owner[opens]] = opens
    parent = np.append(rows_of_ids(events, events["parent"]), -1)
    wanted = first[:-1] >= 0
    around = arrays.find_nearest_ancestor(parent[:-1], wanted, parent[found.owner])
    ctrl = np.where(found.part > 0, first[found.owner], first[around])
    ctrl = np.where(host, ctrl, found.cause)
    return pl.Series(np.where(ctrl >= 0, ctrl + before, 0)).replace(0, None)


def _describe_activities(trace: Trace, found: Activities) -> pl.DataFrame:
    """Name, category, place and what the execution trace says of the operator."""
    owners = pl.Series(found.owner).replace(NO_OWNER, None).cast(pl.UInt32)
    own = trace.events.with_row_index("row").select(
        "row", "id", "name", "cat", "tid", "device", "stream", "rf_id", "dur"
    )
    told = owners.to_frame("row").join(own, on="row", how="left", maintain_order="left")
    sort = pl.Series(found.kind)
    host, part = sort <= ActivityKind.WAIT, pl.Series(found.part)
    opens = host & (part == 0)
    thread = pl.Series(found.thread).replace(-1, None).cast(pl.UInt32)
    tids = thread.to_frame("row").join(own.select("row", "tid"), on="row", how="left", maintain_order="left")[
        "tid"
    ]
    nowhere = pl.when(sort == ActivityKind.WAIT).then(pl.lit("wait")).otherwise(pl.lit("idle"))
    delay = sort == ActivityKind.DELAY
    frame = told.select(
        name=pl.when(delay)
        .then(pl.lit("delay"))
        .otherwise(pl.col("name").cast(pl.String).fill_null(nowhere)),
        cat=pl.when(delay).then(pl.lit("delay")).otherwise(pl.col("cat").cast(pl.String).fill_null(nowhere)),
        tid=tids,
        device=pl.when(~host).then("device"),
        stream=pl.when(~host).then("stream"),
        inclusive_ns=pl.when(opens).then("dur"),
    )
    linked = trace.links.unique("node", keep="first").unique("event", keep="first")
    events = told.select(event=pl.when(opens).then("id"), rf=pl.when(opens).then("rf_id"))
    node = events.join(linked.select("event", "node"), on="event", how="left", maintain_order="left")
    rows = trace.nodes.select(
        "id",
        "et_id",
        "rf_id",
        "fw_parent",
        "seq_id",
        "scope",
        "fw_tid",
        "op_schema",
        "kernel_backend",
        "kernel_file",
    )
    told = node.join(rows, left_on="node", right_on="id", how="left", maintain_order="left")
    told = told.with_columns(pl.coalesce("rf_id", "rf").alias("rf_id"))
    return frame.hstack(told.drop("event", "rf", "node")).hstack(_argument_columns(trace, node["node"]))


def _argument_columns(trace: Trace, node: pl.Series) -> pl.DataFrame:
    """Inputs and outputs of these nodes, null where there is none: values, shapes and types as Python spells them."""
    asked = trace.nodes.filter(pl.col("id").is_in(node.drop_nulls().implode()))
    columns = {"node": asked["id"]}
    for side, texts in zip(("in", "out"), EtNodes(trace).sides(asked), strict=True):
        rest = texts.str.strip_prefix('{"values": ').to_frame("rest")
        for name, following in (("values", "shapes"), ("shapes", "types"), ("types", "strides")):
            # In JSON a quote within a text has a backslash before it, so the first of these is the key.
            pair = rest["rest"].str.splitn(f', "{following}": ', 2).struct.unnest()
            columns[f"{name}_{side}"] = _to_python_literals(pair["field_0"])
            rest = pair.select(rest="field_1")
    return (
        node.to_frame("node")
        .join(pl.DataFrame(columns), on="node", how="left", maintain_order="left")
        .drop("node")
    )


def _to_python_literals(texts: pl.Series) -> pl.Series:
    """JSON as Python spells it: None for null, True for true, False for false."""
    hit = pl.any_horizontal(pl.col("text").str.contains(word, literal=True) for word in _PYTHON_WORDS)
    frame = texts.to_frame("text").with_columns(hit=hit)
    rows = frame["hit"].arg_true()
    if not rows.len():
        return frame["text"]
    # Once a distinct text: shapes, and values without tensors, come again and again.
    some = frame["text"].gather(rows)
    distinct = some.unique()
    spelt = pl.DataFrame({"text": distinct, "spelt": map(_to_python_literal, distinct)})
    found = some.to_frame("text").join(spelt, on="text", how="left", maintain_order="left")["spelt"]
    return frame["text"].scatter(rows, found)


_PYTHON_WORDS = {"null": "None", "true": "True", "false": "False"}
_TOKEN_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:null|true|false)\b')


def _to_python_literal(text: str) -> str:
    return _TOKEN_PATTERN.sub(lambda match: _PYTHON_WORDS.get(match[0], match[0]), text)


def _format_groups(trace: Trace, groups: GroupNumbers) -> str | None:
    """The process groups as the recorder of PyTorch writes them into its first node; None where none is known."""
    listed = []
    for name, description, ranks, size in trace.groups.select(
        pl.col("pg_name", "pg_desc", "ranks").cast(pl.String), "size"
    ).iter_rows():
        if (number := groups.number.get((name, ranks))) is not None:
            members = json.loads(ranks) if ranks else []
            listed.append(
                {"pg_name": str(number), "pg_desc": description, "ranks": members, "group_size": size}
            )
    return "['" + json.dumps(listed).replace("'", "\\u0027") + "']" if listed else None
