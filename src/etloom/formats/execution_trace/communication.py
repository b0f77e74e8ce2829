"""Builds the comms table of an execution trace from record_param_comms and c10d operator nodes.

NCCL, and any backend that uses PyTorch's macro, records ``record_param_comms`` inside the c10d operator. Gloo does not;
there the c10d operator itself is the record. If an operator contains a record, only the record is used.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from etloom.core import arrays, categories
from etloom.core.schema import Stat
from etloom.formats.io.json_text import load_json
from etloom.formats.tables.building import build_frame
from etloom.formats.tables.comms_table import build_groups, normalize_comms

COMM_RECORD = "record_param_comms"
_C10D = r"^c10d::"
_COLUMNS = (
    *(
        "node",
        "collective",
        "pg_name",
        "pg_desc",
        "ranks",
        "group_size",
        "seq",
        "dtype",
        "in_nelems",
        "out_nelems",
    ),
    *("in_split", "out_split", "root", "peer", "reduce_op", "is_async"),
)
_MAX_OPERATOR_DEPTH = 8
"""Number of ancestors of a record among which its c10d operator is searched."""
_IN_GROUP = "in_group"
_NUMEL = 3
"""Index of the number of elements in the value of a tensor."""
_ROLES = {
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), "root"),
    **dict.fromkeys(("send", "recv"), "peer"),
}
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""c10d::ReduceOp::RedOpType by number."""


def build_comms(
    nodes: pl.DataFrame,
    tensors: pl.DataFrame,
    named_attributes: pl.DataFrame,
    stats: list[Stat],
    groups_by_node: Mapping[int, str] | None = None,
) -> pl.DataFrame:
    """Build the comms table of an execution trace: the collectives and point-to-point calls among its nodes.

    Args:
        nodes: The nodes table.
        tensors: The tensors table.
        named_attributes: A row for each record with the named attributes that records have since schema 1.1.0.
        stats: Receives rows about losses.
        groups_by_node: Node -> pg_name, if it is known from another source.
    """
    calls = arrays.match_text(nodes["name"], lambda name: (name == COMM_RECORD) | name.str.contains(_C10D))
    text = arrays.take_rows(nodes.select("id", "name", "op_schema", "inputs"), np.flatnonzero(calls))
    text = text.with_columns(pl.col("name", "op_schema", "inputs").cast(pl.String))
    sizes = _measure_sizes(tensors, text)
    describe = functools.cache(_describe_call)  # most calls are repeated
    rows = {
        node: {**describe(*call), **sizes.get(node, {}), "node": node} for node, *call in text.iter_rows()
    }
    for row in named_attributes.with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True):
        _apply_named_attributes(rows.setdefault(row["node"], {"node": row["node"]}), row)
    names = dict(text.select("id", "name").iter_rows())
    parents = nodes["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    for node in [node for node, name in names.items() if name == COMM_RECORD]:
        ancestor = int(parents[node])
        for _ in range(_MAX_OPERATOR_DEPTH):
            if ancestor < 0:
                break
            rows.pop(ancestor, None)
            ancestor = int(parents[ancestor])
    for node, group in (groups_by_node or {}).items():
        if node in rows and not rows[node].get("pg_name"):
            rows[node]["pg_name"] = group
    members = dict(build_groups(read_group_config(nodes)).select("pg_name", "ranks").iter_rows())
    unresolved = [row.get("collective") for row in rows.values() if not _resolve_group_rank(row, members)]
    unresolved = [name for name in unresolved if re.match(_C10D, str(name))]
    if unresolved:
        example = (
            f"{unresolved[0]}: the call has a rank within an unknown group, so its peer or root is unknown "
            "(etloom collect --observer native records groups)"
        )
        stats.append(Stat("read.rank_within_unknown_group", "data_loss", len(unresolved), example))
    ordered = [{key: row.get(key) for key in _COLUMNS} for _, row in sorted(rows.items())]
    table = build_frame("comms", ordered, stats).select(_COLUMNS)  # a sum of sizes may exceed 64 bits
    return normalize_comms(table, stats).with_row_index("id")


def read_group_config(nodes: pl.DataFrame) -> Any:
    """Read the process groups from the JSON strings of the ``## process_group:init ##`` nodes."""
    groups: list[Any] = []
    is_group_node = arrays.match_text(
        nodes["name"], lambda name: name.str.contains("process_group:init", literal=True)
    )
    for text in arrays.take_rows(nodes["inputs"], np.flatnonzero(is_group_node)).cast(pl.String):
        try:
            (config, *_) = load_json(text)
            parsed = _parse_group_config(config)
        except (TypeError, ValueError, RecursionError):
            continue
        groups += parsed if isinstance(parsed, list) else []
    return groups


def _parse_group_config(config: str) -> Any:
    """Parse a JSON list of objects; if it is cut off, return its complete objects."""
    try:
        return load_json(config)
    except ValueError:
        return load_json(f"{config.rpartition('}')[0]}}}]")


def _describe_call(name: str, op_schema: str | None, inputs: str | None) -> dict[str, Any]:
    values = _load_list(inputs)
    if name == COMM_RECORD:
        return _parse_positional_record(values)
    return {"collective": name, **_parse_by_schema(values, op_schema or "")}


def describe_record(inputs: Any) -> dict[str, Any]:
    """Parse the inputs of a record_param_comms node, by their positions, to the columns of a comms row.

    inputs: the member of the node: ``values``, ``shapes`` and ``types``. Empty if it is not a record.
    """
    values, types = (inputs.get(key) if isinstance(inputs, dict) else None for key in ("values", "types"))
    if not isinstance(values, list) or not isinstance(types, list):
        return {}
    row = _parse_positional_record(values)
    row.pop(_IN_GROUP, None)
    if not row:
        return {}
    counts = [
        tensor[_NUMEL]
        for value, kind in zip(values, types, strict=False)
        if isinstance(kind, str) and "Tensor(" in kind and isinstance(value, list)
        for tensor in (value if value and isinstance(value[0], list) else [value])
        if isinstance(tensor, list) and len(tensor) > _NUMEL and _to_int(tensor[_NUMEL]) is not None
    ]
    dtypes = [match[1] for kind in types if (match := re.search(r"Tensor\(([^)]*)\)", str(kind)))]
    if counts:
        row |= {"in_nelems": _to_int(sum(counts)), "dtype": dtypes[0] if dtypes else None}
    return row


def _parse_positional_record(values: list[Any]) -> dict[str, Any]:
    """Parse a record's inputs ([tensors], seq, group, rank, name, in_split, out_split, rank start, stride, size).

    The position of an input counts from the name, the first text. The group is (name, description), or before schema
    1.0.3 the address of the group. The rank within the group is the root, the peer of a message, or otherwise the
    recording rank itself. seq may be (seq, is p2p).
    """
    at = next(
        (i for i, value in enumerate(values) if isinstance(value, str) and not value.startswith("<")), None
    )
    if at is None or at < 3:
        return {}
    group, seq = values[at - 2], values[at - 3]
    name, desc = _split_group(group)
    row: dict[str, Any] = {
        "collective": values[at],
        "seq": _to_int(seq[0] if isinstance(seq, list) and seq else seq),
        _IN_GROUP: _to_int(values[at - 1]),
        "pg_name": None if name is None else str(name),
        "pg_desc": desc if isinstance(desc, str) else None,
    }
    for key, split in zip(("in_split", "out_split"), values[at + 1 : at + 3], strict=False):
        row[key] = json.dumps(split) if isinstance(split, list) and split else None
    start, stride, size = ([_to_int(value) for value in values[at + 3 : at + 6]] + [None] * 3)[:3]
    return {**row, **_list_group_ranks(start, stride, size)}


def _split_group(group: Any) -> tuple[Any, Any]:
    """Split a recorded process group (a name, or a list [name, description]) into name and description, or None."""
    if not isinstance(group, list):
        return group, None
    return (group[0] if group else None), (group[1] if len(group) > 1 else None)


def _resolve_group_rank(row: dict[str, Any], members: dict[str, str | None]) -> bool:
    """Set the root or peer of a comms row: convert the recorded rank within the group to a global rank.

    A c10d operator does not name its group; then all groups with enough ranks must agree.

    Returns:
        False if the global rank is unknown.
    """
    role = _ROLES.get(categories.parse_collective(str(row.get("collective"))) or "")
    group_rank = row.pop(_IN_GROUP, None)
    if role is None or group_rank is None:
        return True
    group = row.get("pg_name")
    has_group = group or row.get("ranks")
    texts = [row.get("ranks") or members.get(group or "")] if has_group else members.values()
    candidates = [_load_list(ranks) for ranks in texts]
    global_ranks = {_to_int(ranks[group_rank]) for ranks in candidates if 0 <= group_rank < len(ranks)}
    if len(global_ranks) != 1 or [] in candidates:
        return False
    row[role] = global_ranks.pop()
    return True


def _list_group_ranks(start: int | None, stride: int | None, size: int | None) -> dict[str, Any]:
    """Return group_size and, if known, ranks (JSON) of a process group whose ranks have a constant stride.

    With more than one rank, a start or stride of 0 or -1 means unknown.
    """
    members: dict[str, Any] = {"group_size": size}
    if size is not None and start is not None and stride is not None and 0 < size <= 1 << 20 and start >= 0:
        if stride > 0:
            members["ranks"] = json.dumps(list(range(start, start + stride * size, stride)))
        elif size == 1:
            members["ranks"] = json.dumps([start])
    return members


def _parse_by_schema(values: list[Any], schema: str) -> dict[str, Any]:
    """Parse the arguments of a c10d operator to columns of comms, by the argument names in its schema."""
    arguments = dict(zip(categories.parse_argument_names(schema), values, strict=False))
    reduce_op = _to_int(arguments.get("reduce_op"))
    group_ranks = [_to_int(arguments.get(name)) for name in ("root_rank", "root", "dst", "src")]
    return {
        _IN_GROUP: next((rank for rank in group_ranks if rank is not None), None),
        "is_async": arguments["async_op"] if isinstance(arguments.get("async_op"), bool) else None,
        "in_split": _encode_splits(arguments.get("input_split_sizes")),
        "out_split": _encode_splits(arguments.get("output_split_sizes")),
        "reduce_op": _REDUCE_OPS[reduce_op]
        if reduce_op is not None and 0 <= reduce_op < len(_REDUCE_OPS)
        else None,
    }


def _apply_named_attributes(row: dict[str, Any], named: dict[str, Any]) -> None:
    """Overwrite values of a comms row with those that the node states as named attributes (``named``)."""
    for key in ("collective", "pg_name", "pg_desc", "dtype", "in_nelems", "out_nelems"):
        if named[key] is not None:
            row[key] = named[key]
    for key in ("in_split", "out_split"):
        if named[key] not in (None, "[]"):
            row[key] = named[key]
    if named["is_async"] is not None:
        row["is_async"] = bool(named["is_async"])
    if named["group_size"] is not None:
        row.update(_list_group_ranks(named["rank_start"], named["rank_stride"], named["group_size"]))


def _measure_sizes(tensors: pl.DataFrame, calls: pl.DataFrame) -> dict[int, dict[str, Any]]:
    """Return, by node, in_nelems and out_nelems (elements of input and output tensors) and the first tensor's dtype.

    A c10d operator also receives the tensors that it writes, so the names of its arguments decide. A message has one
    size, which counts as in and out, as in NCCL's records.
    """
    signatures = {node: (name, schema or "") for node, name, schema, _ in calls.iter_rows()}
    names = functools.cache(categories.parse_argument_names)
    sizes: dict[int, dict[str, Any]] = {}
    call_tensors = tensors.join(calls.select(node="id"), on="node", how="semi")
    rows = call_tensors.select("node", "io", "index", "numel", pl.col("dtype").cast(pl.String))
    for node, io, index, numel, dtype in rows.iter_rows():
        row = sizes.setdefault(node, {"in_nelems": 0, "out_nelems": 0, "dtype": dtype})
        name, schema = signatures[node]
        arguments = names(schema) if schema else []
        if not arguments:
            is_input, is_output = io == 0, io == 1
        elif io == 0:
            is_message = categories.parse_collective(name) in ("send", "recv")
            argument = arguments[index] if index < len(arguments) else ""
            is_input, is_output = (
                (True, True) if is_message else categories.get_tensor_directions(name, argument)
            )
        else:
            continue  # the operator returns the tensors that it writes
        row["in_nelems"] += (numel or 0) * is_input
        row["out_nelems"] += (numel or 0) * is_output
    return sizes


def _encode_splits(value: Any) -> str | None:
    return json.dumps(value) if isinstance(value, list) and value else None


def _to_int(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value != -1 and abs(value) < 1 << 63 else None


def _load_list(text: str | None) -> list[Any]:
    try:
        value = load_json(text or "[]")
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []
