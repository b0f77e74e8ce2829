"""Costs of the calls of a trace, from Kineto's shapes or the execution trace's; each distinct call is computed once."""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from etloom.analyses.flops.formulas import find_entry
from etloom.analyses.flops.operator_call import Call, Cost, parse_kineto_call, parse_node_call
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.trace import Trace

_MAX_COUNT = 2**56
"""Upper limit for the operations or bytes of one call, so that sums fit into 64 bits."""
_COSTS = {
    "flops": pl.Int64,
    "bytes": pl.Int64,
    "model_flops": pl.Int64,
    "dtype": pl.String,
    "assumed": pl.String,
}
_KEY = ("name", "dims", "types", "strides", "values", "context")


def add_costs(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Add argument shapes, types and cost (flops, bytes) to operator calls; the cost is null if unknown or not
    counted. ``calls`` have a column ``context`` (see `etloom.analyses.flops.call_context`)."""
    arguments = trace.arguments.select("dims", "types", "strides", id="event", values="concrete_inputs")
    calls = calls.hstack(take_rows(arguments.drop("id"), rows_of_ids(arguments, calls["id"])))
    distinct = calls.filter("costed").select(_KEY).unique()
    costs = distinct.hstack(_make_frame([_kineto_cost(row) for row in distinct.iter_rows(named=True)]))
    calls = calls.join(costs, on=list(_KEY), how="left", nulls_equal=True, maintain_order="left")
    # An operator that is not counted may have the same name and arguments: it only keeps its time.
    calls = calls.with_columns(pl.when("costed").then(pl.col(name)).alias(name) for name in _COSTS)
    # Kineto does not record element types of tensor lists, so bytes may be unknown where flops are known.
    missing = calls.filter("costed", pl.col("flops").is_null() | pl.col("bytes").is_null())
    links = trace.links.select("node", id="event").unique("id", keep="first")
    node_costs = compute_node_costs(trace, missing.select("id").join(links, on="id")).drop("node", "name")
    if not node_costs.height:
        return calls
    return calls.join(node_costs, on="id", how="left", maintain_order="left", suffix="_recorded").select(
        pl.exclude("dims", "types", *_COSTS, r"^.*_recorded$"),
        *(
            pl.coalesce(pl.col(name).cast(pl.String), f"{name}_recorded").alias(name)
            for name in ("dims", "types")
        ),
        *(pl.coalesce(name, f"{name}_recorded").alias(name) for name in _COSTS),
    )


def _make_frame(costs: list[Cost | None]) -> pl.DataFrame:
    none = Cost(None, None)
    rows = [
        (
            cost.flops,
            cost.bytes,
            cost.flops if cost.model_flops is None else cost.model_flops,
            cost.dtype,
            cost.assumed,
        )
        for cost in (cost or none for cost in costs)
    ]
    return pl.DataFrame(rows, schema=_COSTS, orient="row")


def compute_cost(call: Call) -> Cost | None:
    """Return the cost (flops and bytes) of an operator call; None if it cannot be computed.

    None without a formula, if required data is missing, or if the result is out of range.
    """
    formula_entry = find_entry(call.name)
    if formula_entry is None:
        return None
    try:
        cost = formula_entry.formula(call)
    except (ValueError, ArithmeticError, LookupError, TypeError):
        return None
    numbers = (cost.flops, cost.bytes, cost.model_flops)
    return cost if all(number is None or 0 <= number < _MAX_COUNT for number in numbers) else None


def _kineto_cost(row: dict[str, Any]) -> Cost | None:
    if not row["dims"]:
        return None
    try:
        call = parse_kineto_call(
            row["name"], row["dims"], row["types"], row["strides"], row["values"], row["context"]
        )
    except (ValueError, TypeError, RecursionError):
        return None
    return compute_cost(call)


def compute_node_costs(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Add the name, argument shapes and types, and cost (flops, bytes) of each execution-trace node to the rows
    ``calls``."""
    nodes = trace.nodes.select("name", "inputs", node="id")
    calls = calls.join(nodes, on="node", maintain_order="left")
    tensors = trace.tensors.join(calls.select("node"), on="node", how="semi").sort(
        "node", "io", "index", "item"
    )
    columns = ("io", "index", "item", "dtype", "shape", "stride")
    texts = pl.concat_str(pl.col(columns).cast(pl.String), separator="|", ignore_nulls=True)
    keys = tensors.group_by("node").agg(texts.str.join(";").alias("key"))
    calls = calls.join(keys, on="node", how="left", maintain_order="left")
    # One node represents all with the same name, tensors and values.
    distinct = calls.group_by("name", "inputs", "key", maintain_order=True).agg(
        pl.col("node").first().alias("sample_node")
    )
    distinct_tensors = tensors.join(
        distinct.select("sample_node"), left_on="node", right_on="sample_node", how="semi"
    )
    lists = {
        key: group.to_dicts() for (key,), group in distinct_tensors.group_by("node", maintain_order=True)
    }
    rows: list[tuple[Any, ...]] = []
    costs: list[Cost | None] = []
    for name, inputs, _, node in distinct.iter_rows():
        tensor_rows = lists.get(node, [])
        try:
            costs.append(compute_cost(parse_node_call(name, tensor_rows, inputs)))
        except (ValueError, TypeError, RecursionError):
            costs.append(None)
        plain = [row for row in tensor_rows if not row["io"]]
        rows.append(tuple(_format_list(plain, column) for column in ("shape", "dtype")))
    arguments = pl.DataFrame(rows, schema={"dims": pl.String, "types": pl.String}, orient="row")
    distinct = distinct.drop("sample_node").hstack(arguments).hstack(_make_frame(costs))
    keyed = ["name", "inputs", "key"]
    return calls.join(distinct, on=keyed, how="left", nulls_equal=True, maintain_order="left").drop(
        "inputs", "key"
    )


def _format_list(tensors: list[dict[str, Any]], name: str) -> str:
    """Return the column ``name`` (shape or dtype) of tensors as a JSON list."""
    if name == "shape":
        return f"[{', '.join(tensor[name] or 'null' for tensor in tensors)}]"
    return json.dumps([tensor[name] for tensor in tensors])
