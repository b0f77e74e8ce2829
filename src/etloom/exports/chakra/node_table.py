"""Convert the activities of a linked trace to a table of Chakra nodes, with a column per field or attribute."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from etloom.analyses.flops.counting import assign_kernels, count_calls
from etloom.core import arrays, categories, nesting
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.exports.chakra.activities import NO_OWNER, Activities, ActivityKind, build_activities
from etloom.exports.chakra.communication_nodes import build_communication_columns
from etloom.exports.chakra.group_numbering import GroupNumbers
from etloom.exports.chakra.rank_timing import add_start_node, count_overlaps_once
from etloom.formats.chakra.protobuf import TYPE_NUMBERS
from etloom.formats.chakra.writing import NodeTable
from etloom.formats.execution_trace.node_json import NodeTexts
from etloom.graphs import build_graph
from etloom.graphs.event_arrays import rows_of_ids

_NODE_COLUMNS = (
    *("et_id", "rf_id", "fw_parent", "seq_id", "scope", "fw_tid", "op_schema", "kernel_backend"),
    "kernel_file",
)
"""Columns of the nodes table that become attributes."""


def build_nodes(
    trace: Trace,
    groups: GroupNumbers,
    *,
    delays: bool,
    serialize: bool = True,
    memory: bool = False,
    offset_ns: int = 0,
) -> NodeTable:
    """Build the table of Chakra nodes, with dependencies, of a linked trace of one rank.

    Args:
        trace: A linked trace.
        groups: Numbers of the process groups.
        delays: Whether delays before GPU work are nodes.
        serialize: Whether overlapping work of one resource counts once, see `count_overlaps_once`.
        memory: Whether copies between host and device are memory nodes instead of computations.
        offset_ns: Time by which the rank starts later than the first one of its job.
    """
    activities = _build_activities(trace, delays=delays)
    table = pl.DataFrame(
        {
            "id": np.arange(1, 1 + len(activities)),
            "ctrl": _control_dependencies(trace, activities),
            "start_time_micros": activities.start - min(0, int(activities.start.min(initial=0))),
            "duration_micros": activities.duration,
            "is_cpu_op": np.isin(activities.kind, (ActivityKind.HOST, ActivityKind.WAIT)),
            "part": pl.Series(activities.part).replace(0, None),
            "start_ns": activities.start_ns,
            "duration_ns": activities.end_ns - activities.start_ns,
        }
    )
    table = table.hstack(_describe_activities(trace, activities))
    table = table.hstack(build_communication_columns(trace, activities, groups))
    is_computation = (table["type"] == TYPE_NUMBERS["COMP_NODE"]) & pl.Series(
        activities.kind == ActivityKind.DEVICE
    )
    work = pl.DataFrame({"owner": np.where(is_computation.to_numpy(), activities.owner, NO_OWNER)})
    table = table.hstack(build_roofline_columns(trace, _ids_of_rows(trace, work["owner"])))
    if memory:
        table = _mark_memory_nodes(table, trace, activities)
    nodes = NodeTable(
        count_overlaps_once(table) if serialize else table, activities.first, activities.dependencies + 1
    )
    return add_start_node(nodes, offset_ns) if offset_ns >= 1000 and table.height else nodes


def _mark_memory_nodes(table: pl.DataFrame, trace: Trace, activities: Activities) -> pl.DataFrame:
    """Make copies between host and device, whose bytes are known, MEM_LOAD (to the device) and MEM_STORE nodes."""
    rows = np.where(activities.kind == ActivityKind.DEVICE, activities.owner, NO_OWNER)
    event, name, category = (arrays.take_rows(trace.events[column], rows) for column in ("id", "name", "cat"))
    facts = rows_of_ids(trace.kernels.rename({"event": "id"}), event)
    copies = pl.DataFrame(
        {
            "name": name.cast(pl.String),
            "bytes": arrays.take_rows(trace.kernels["bytes"], facts),
            "is_copy": category.cast(pl.String).is_in(list(categories.MEMCPY_CATEGORIES)),
        }
    )
    node_type = pl.lit(None, pl.Int64)
    for kind, direction in _MEMORY_DIRECTIONS.items():
        matches = pl.col("name").str.contains(direction) & pl.col("is_copy") & pl.col("bytes").is_not_null()
        node_type = pl.when(matches).then(pl.lit(TYPE_NUMBERS[kind], pl.Int64)).otherwise(node_type)
    marks = copies.select(memory_type=node_type, memory_size="bytes")
    is_memory = pl.col("memory_type").is_not_null()
    return (
        table.hstack(marks)
        .with_columns(
            type=pl.coalesce("memory_type", "type"),
            tensor_size=pl.when(is_memory).then("memory_size").otherwise("tensor_size"),
            num_ops=pl.when(is_memory).then(None).otherwise("num_ops"),
        )
        .select(table.columns)
    )


_MEMORY_DIRECTIONS = {
    "MEM_LOAD_NODE": r"(?i)HtoD|HostToDevice",
    "MEM_STORE_NODE": r"(?i)DtoH|DeviceToHost",
}


def _build_activities(trace: Trace, *, delays: bool) -> Activities:
    """Cut the dependency graph into activities, each owned by its innermost operator.

    Outside of operators, by the runtime call.
    """
    events, graph = trace.events, build_graph(trace).graph
    parent = rows_of_ids(events, events["parent"])
    is_operator = arrays.is_in(
        events["cat"], categories.OPERATOR_CATEGORIES | categories.ANNOTATION_CATEGORIES
    )
    is_call = categories.mask_events(events, categories.RUNTIME_CATEGORIES)
    owner = rows_of_ids(events, _nullable_ids(graph.owner))
    operator = nesting.find_nearest_ancestor(parent, is_operator, owner)
    is_outside_call = (operator < 0) & (owner >= 0) & np.append(is_call, False)[owner]
    row = rows_of_ids(events, _nullable_ids(graph.event)).astype(np.int64)
    kinds = categories.add_kernel_type(events.select("cat", "name"))["kind"]
    is_computation = (kinds.is_not_null() & (kinds != "communication")).to_numpy()
    owners = np.where(is_outside_call, owner, operator)
    return build_activities(graph, row, owners, is_computation, delays=delays)


def _ids_of_rows(trace: Trace, rows: pl.Series) -> pl.Series:
    """Return the event ids at the row numbers ``rows`` of the table `events`; null for NO_OWNER."""
    return arrays.take_rows(trace.events["id"], rows.to_numpy())


def _nullable_ids(ids: np.ndarray) -> pl.Series:
    return pl.Series(ids).replace(-1, None)


def _control_dependencies(trace: Trace, activities: Activities) -> pl.Series:
    """Return for each node the id of the node on which it has a control dependency; null for none.

    The first part of an operator depends on the enclosing operator, its other parts on the first one, GPU work and
    ranges on the activity that launched or issued them.
    """
    events = trace.events
    on_host = activities.kind <= ActivityKind.WAIT
    opening = np.flatnonzero(on_host & (activities.part == 0) & (activities.owner != NO_OWNER))
    first_part = np.full(events.height + 1, -1, np.int64)  # one more, so that first_part[-1] is -1
    first_part[activities.owner[opening]] = opening
    parent = np.append(rows_of_ids(events, events["parent"]), -1)
    has_activity = first_part[:-1] >= 0
    enclosing = nesting.find_nearest_ancestor(parent[:-1], has_activity, parent[activities.owner])
    ctrl = np.where(activities.part > 0, first_part[activities.owner], first_part[enclosing])
    ctrl = np.where(on_host, ctrl, activities.cause)
    return pl.Series(np.where(ctrl >= 0, ctrl + 1, 0)).replace(0, None)


def _describe_activities(trace: Trace, activities: Activities) -> pl.DataFrame:
    """Return name, category, thread, device and stream of each activity, and its execution-trace columns.

    Those are set for the first part of an operator only.
    """
    event_columns = trace.events.with_row_index("row").select(
        "row", "id", "name", "cat", "tid", "device", "stream", "rf_id", "dur"
    )
    owners = pl.Series(activities.owner).replace(NO_OWNER, None).cast(pl.UInt32)
    owned = owners.to_frame("row").join(event_columns, on="row", how="left", maintain_order="left")
    kind = pl.Series(activities.kind)
    on_host, is_delay = kind <= ActivityKind.WAIT, kind == ActivityKind.DELAY
    is_opening = on_host & (pl.Series(activities.part) == 0)
    threads = pl.Series(activities.thread).replace(-1, None).cast(pl.UInt32)
    tids = threads.to_frame("row").join(
        event_columns.select("row", "tid"), on="row", how="left", maintain_order="left"
    )
    unowned = pl.when(kind == ActivityKind.WAIT).then(pl.lit("wait")).otherwise(pl.lit("idle"))
    name, category = (
        pl.when(is_delay).then(pl.lit("delay")).otherwise(pl.col(column).cast(pl.String).fill_null(unowned))
        for column in ("name", "cat")
    )
    described = owned.select(
        name=name,
        cat=category,
        tid=tids["tid"],
        device=pl.when(~on_host).then("device"),
        stream=pl.when(~on_host).then("stream"),
        inclusive_ns=pl.when(is_opening).then("dur"),
    )
    opening_events = owned.select(
        event=pl.when(is_opening).then("id"), event_rf_id=pl.when(is_opening).then("rf_id")
    )
    return described.hstack(_execution_trace_columns(trace, opening_events))


def _execution_trace_columns(trace: Trace, events: pl.DataFrame) -> pl.DataFrame:
    """Return attributes, inputs and outputs of the execution-trace node linked to each event; null for none.

    events: columns event (id or null) and event_rf_id.
    """
    links = trace.links.unique("node", keep="first").unique("event", keep="first")
    nodes = events.join(links.select("event", "node"), on="event", how="left", maintain_order="left")
    columns = trace.nodes.select("id", *_NODE_COLUMNS)
    attributes = nodes.join(columns, left_on="node", right_on="id", how="left", maintain_order="left")
    attributes = attributes.with_columns(pl.coalesce("rf_id", "event_rf_id").alias("rf_id"))
    return attributes.select(_NODE_COLUMNS).hstack(_argument_columns(trace, nodes["node"]))


def _argument_columns(trace: Trace, node: pl.Series) -> pl.DataFrame:
    """Return values, shapes and types of each node's inputs and outputs as Python literals; null for no node."""
    linked = trace.nodes.filter(pl.col("id").is_in(node.drop_nulls().implode()))
    columns = {"node": linked["id"]}
    for suffix, texts in zip(("in", "out"), NodeTexts(trace).argument_texts(linked), strict=True):
        for name in ("values", "shapes", "types"):
            columns[f"{name}_{suffix}"] = _to_python_literals(texts[name])
    arguments = pl.DataFrame(columns)
    return node.to_frame("node").join(arguments, on="node", how="left", maintain_order="left").drop("node")


def _to_python_literals(texts: pl.Series) -> pl.Series:
    """Convert JSON texts to Python literals: null to None, true to True, false to False."""
    contains_word = pl.any_horizontal(
        pl.col("text").str.contains(word, literal=True) for word in _PYTHON_WORDS
    )
    rows = texts.to_frame("text").select(contains_word).to_series().arg_true()
    if not rows.len():
        return texts
    # Each distinct text is converted once: shapes, and values without tensors, repeat often.
    affected = texts.gather(rows)
    distinct = affected.unique()
    lookup = pl.DataFrame({"text": distinct, "python": map(_to_python_literal, distinct)})
    converted = affected.to_frame("text").join(lookup, on="text", how="left", maintain_order="left")
    return texts.scatter(rows, converted["python"])


_PYTHON_WORDS = {"null": "None", "true": "True", "false": "False"}
_TOKEN_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:null|true|false)\b')


def _to_python_literal(text: str) -> str:
    return _TOKEN_PATTERN.sub(lambda match: _PYTHON_WORDS.get(match[0], match[0]), text)


# Compute num_ops and tensor_size, from which a simulator estimates the time of GPU work with a roofline.
#
# They are the operations and bytes of the call that launched the work, as `etloom analyze flops` defines them (see
# docs/flops.md); of a call with several kernels, each has a share by its duration. ASTRA-sim uses them if its
# roofline is enabled, and the duration otherwise.

_CALL = ["row", "replay"]
_SCHEMA = {"num_ops": pl.Int64, "tensor_size": pl.Int64}


def build_roofline_columns(trace: Trace, events: pl.Series) -> pl.DataFrame:
    """Return num_ops (FLOP) and tensor_size (bytes) of each GPU activity; both null if one is unknown or 0.

    Args:
        trace: A linked trace.
        events: Ids of the GPU work of each row, null for other rows.
    """
    unknown = pl.DataFrame({name: [None] * len(events) for name in _SCHEMA}, schema=_SCHEMA)
    try:
        calls = count_calls(trace).select(*_CALL, "flops", "bytes").drop_nulls()
        work = assign_kernels(trace).filter(pl.col("row") >= 0).select(*_CALL, "id", "dur")
    except AnalysisError:  # no shapes, or no GPU activity
        return unknown
    shared = work.join(calls, on=_CALL).with_columns(
        share=pl.when(pl.col("dur").sum().over(_CALL) > 0)
        .then(pl.col("dur") / pl.col("dur").sum().over(_CALL))
        .otherwise(1 / pl.len().over(_CALL))
    )
    costs = shared.select(
        "id",
        num_ops=(pl.col("flops") * pl.col("share")).round().cast(pl.Int64),
        tensor_size=(pl.col("bytes") * pl.col("share")).round().cast(pl.Int64),
    ).filter((pl.col("num_ops") > 0) & (pl.col("tensor_size") > 0))
    rows = events.cast(pl.UInt32).to_frame("id")
    costs = costs.with_columns(pl.col("id").cast(pl.UInt32)).unique("id", keep="first")
    return rows.join(costs, on="id", how="left", maintain_order="left").select(*_SCHEMA)
