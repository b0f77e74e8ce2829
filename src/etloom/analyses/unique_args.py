"""Operators by their arguments: shapes and types they are called with, how often, and their cost.

One row per operator, shapes, types and (if recorded) values of its inputs, as JSON. self_ns: excluding callees.
device_ns: time of the kernels launched by it or its callees, null if the trace has no GPU activity. If Kineto did not
record the shapes of an operator, they are taken from its node in the execution trace, in that notation: the value of a
tensor is null. replayed: calls within replays of device graphs, which count for device_ns but take no host time. For
an execution trace alone: its operators without times, most frequent first.

Units: ns. Needs shapes: record_shapes=True, or the run's execution trace. Definition: TraceLens' ops_unique_args.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import polars as pl

from etloom.analyses.helpers import Step, check_top, conform_columns, filter_step, require_linked
from etloom.analyses.helpers.operator_times import measure_operators, measure_replayed_operators
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.steps import STEP_PREFIX
from etloom.core.text import format_ranges
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, explain_missing_times, find_step_nodes, has_device_events

SCOPE = "rank"
COLUMNS = {
    "name": pl.String,
    "shapes": pl.String,
    "types": pl.String,
    "values": pl.String,
    "count": pl.Int64,
    "self_ns": pl.Int64,
    "total_ns": pl.Int64,
    "device_ns": pl.Int64,
    "mean_device_ns": pl.Float64,
    "replayed": pl.Int64,
}

_OPERATORS = (0, 1)  # PyTorch's scopes of functions and backward functions
_NOT_OPERATOR = (
    rf"^\[pytorch\|profiler|^{STEP_PREFIX}"  # process, threads, steps; not all files contain scopes
)


def analyze(
    trace: Trace,
    *,
    operator: Annotated[str | None, "Only operators with this name."] = None,
    top: Annotated[int, "Number of rows, most expensive first."] = 50,
    step: Step = None,
) -> pl.DataFrame:
    check_top(top)
    require_linked(trace)
    recorded = trace.rows("events") > 0
    calls = _list_timed_operators(trace) if recorded else _list_untimed_operators(trace)
    arguments = (
        _describe_events(trace, calls["id"]) if recorded else _describe_nodes(trace, calls.select("node"))
    )
    arguments = arguments.select("shapes", "types", "values")
    if arguments["shapes"].null_count() == calls.height:
        raise (None if trace.rows("nodes") else explain_missing_times(trace)) or AnalysisError(
            "the trace contains no operators with shapes",
            where=describe_rank(trace),
            remedy="profile with record_shapes=True, or add the run's execution trace to the folder",
        )
    calls = calls.hstack(arguments)
    calls = filter_step(trace, calls, step) if recorded else _filter_step_nodes(trace, calls, step)
    calls = calls if operator is None else calls.filter(pl.col("name") == operator)
    table = calls.group_by("name", "shapes", "types", "values").agg(
        pl.col("replayed").not_().sum().alias("count"),
        pl.col("replayed").sum(),
        pl.col("self_ns").sum(),
        pl.col("dur").sum().alias("total_ns"),
        pl.col("device_ns").sum(),
        pl.col("device_ns").mean().alias("mean_device_ns"),
    )
    sort_column = "device_ns"
    if not has_device_events(trace):
        sort_column = "self_ns" if recorded else "count"
        table = table.with_columns(device_ns=None, mean_device_ns=None)
    if not recorded:
        table = table.with_columns(self_ns=None, total_ns=None)
    table = conform_columns(table, COLUMNS)
    keys = (sort_column, "name", "shapes", "types", "values")
    return table.sort(keys, descending=(True, False, False, False, False)).head(top)


def _list_timed_operators(trace: Trace) -> pl.DataFrame:
    """Return the times of operators (see `measure_operators`), also of captured operators in device graph replays."""
    calls, replayed = measure_operators(trace), measure_replayed_operators(trace)
    if not replayed.height:
        return calls.with_columns(replayed=pl.lit(False))
    replayed = replayed.with_columns(replayed=pl.lit(True))
    return pl.concat([calls.with_columns(replayed=pl.lit(False)), replayed], how="diagonal_relaxed")


def _list_untimed_operators(trace: Trace) -> pl.DataFrame:
    """Return node, name and null times (columns of `measure_operators`) of the operators of an execution trace."""
    name = pl.col("name").cast(pl.String)
    is_operator = pl.col("scope").is_in(_OPERATORS).fill_null(True) & ~name.str.contains(_NOT_OPERATOR)
    times = dict.fromkeys(("self_ns", "dur", "device_ns"), pl.lit(None, pl.Int64))
    return trace.nodes.filter(is_operator).select(name, node="id", replayed=pl.lit(False), **times)


def _filter_step_nodes(trace: Trace, calls: pl.DataFrame, step: int | None) -> pl.DataFrame:
    """Return the execution-trace nodes of a step: those after its annotation, because ids are assigned in time
    order."""
    if step is None:
        return calls
    step_nodes = find_step_nodes(trace.nodes).select("step", node="id").sort("node")
    if step not in step_nodes["step"]:
        available = (
            f"available steps: {format_ranges(step_nodes['step'])}"
            if step_nodes.height
            else "no step is annotated with ProfilerStep"
        )
        raise AnalysisError(
            f"the trace contains no step {step}", where=describe_rank(trace), remedy=available
        )
    return calls.sort("node").join_asof(step_nodes, on="node").filter(pl.col("step") == step)


def _describe_events(trace: Trace, ids: pl.Series) -> pl.DataFrame:
    """Return shapes, types and values of events' arguments: from Kineto, else from the linked execution-trace node,
    else null."""
    columns = ("shapes", "types", "values")
    arguments = trace.arguments.select("event", shapes="dims", types="types", values="concrete_inputs")
    recorded = take_rows(arguments.drop("event"), rows_of_ids(arguments.rename({"event": "id"}), ids))
    recorded = recorded.with_columns(pl.col(columns).cast(pl.String))
    missing = ids.filter(recorded["shapes"].is_null())
    links = trace.links.select("node", id="event").filter(pl.col("id").is_in(missing.implode()))
    if not links.height:
        return recorded
    from_nodes = _describe_nodes(trace, links.unique("id", keep="first", maintain_order=True))
    from_nodes = take_rows(from_nodes.select(columns), rows_of_ids(from_nodes, ids))
    is_recorded = pl.Series(recorded["shapes"].is_not_null())
    return recorded.select(
        pl.when(is_recorded).then(name).otherwise(from_nodes[name]).alias(name) for name in columns
    )


def _describe_nodes(trace: Trace, nodes: pl.DataFrame) -> pl.DataFrame:
    """Add argument shapes, types and values in Kineto's notation to execution-trace nodes; converts each distinct call
    once."""
    nodes = nodes.join(
        trace.nodes.select("inputs", "input_types", node="id"), on="node", maintain_order="left"
    )
    tensors = trace.tensors.filter(pl.col("io") == 0).join(nodes.select("node"), on="node", how="semi")
    columns = ("index", "item", "dtype", "shape")
    text = pl.concat_str(pl.col(columns).cast(pl.String).fill_null(""), separator="|")
    keys = tensors.sort("node", "index", "item").group_by("node").agg(text.str.join(";").alias("key"))
    nodes = nodes.join(keys, on="node", how="left", maintain_order="left")
    call = ("inputs", "input_types", "key")
    distinct = nodes.group_by(call, maintain_order=True).agg(pl.col("node").first())
    distinct_tensors = tensors.join(distinct.select("node"), on="node", how="semi").sort(
        "node", "index", "item"
    )
    lists = {
        node: part.rows() for (node,), part in distinct_tensors.select("node", *columns).group_by("node")
    }
    rows = [
        _format_arguments(inputs, types, lists.get(node, []))
        for inputs, types, _, node in distinct.iter_rows()
    ]
    schema = dict.fromkeys(("shapes", "types", "values"), pl.String)
    distinct = distinct.drop("node").hstack(pl.DataFrame(rows, schema=schema, orient="row"))
    return nodes.join(distinct, on=call, how="left", nulls_equal=True, maintain_order="left")


def _format_arguments(
    inputs: str | None, input_types: str | None, tensors: list[tuple[int, int, int | None, str, str]]
) -> tuple[str | None, str | None, str | None]:
    """Return the shapes, types and values of an operator call's arguments as JSON lists.

    Args:
        inputs: Values, as JSON.
        input_types: Types, as JSON.
        tensors: (node, index, item, dtype, shape), in order.
    """
    values, types = (_parse_list(text) for text in (inputs, input_types))
    size = max([len(values), *(index + 1 for _, index, *_ in tensors)])
    if not size:
        return None, None, None
    shapes: list[Any] = [[] for _ in range(size)]
    types = [*types, *[None] * (size - len(types))]
    values = [*values, *[None] * (size - len(values))]
    for _, index, item, dtype, shape in tensors:
        sizes = json.loads(shape) if shape else None
        values[index] = None
        if item is None:
            shapes[index], types[index] = sizes, dtype
        else:
            shapes[index].append(sizes)
            types[index] = "TensorList"
    return json.dumps(shapes), json.dumps(types), json.dumps(values)


def _parse_list(text: str | None) -> list[Any]:
    """Return the list that a JSON text contains; an empty list if the text is empty or contains another value."""
    parsed = json.loads(text) if text else []
    return parsed if isinstance(parsed, list) else []
