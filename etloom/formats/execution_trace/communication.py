"""Communication in an execution trace: record_param_comms in its named and its positional form, and c10d operators.

NCCL, and any backend that uses PyTorch's macro, records ``record_param_comms`` inside the c10d operator; gloo does
not, so there the c10d operator itself is the record. Of an operator and a record inside it only the record counts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import polars as pl

from etloom.core import arrays, categories
from etloom.core.schema import Stat
from etloom.formats.io.native_parser import load_json
from etloom.formats.tables.comms_table import build_groups, normalize_comms

COMM_RECORD = "record_param_comms"
_C10D = r"^c10d::"
_COLUMNS = {
    "node": pl.UInt32,
    "collective": pl.String,
    "pg_name": pl.String,
    "pg_desc": pl.String,
    "ranks": pl.String,
    "group_size": pl.Int64,
    "seq": pl.Int64,
    "dtype": pl.String,
    "in_nelems": pl.Int64,
    "out_nelems": pl.Int64,
    "in_split": pl.String,
    "out_split": pl.String,
    "root": pl.Int64,
    "peer": pl.Int64,
    "reduce_op": pl.String,
    "is_async": pl.Boolean,
}
_IN_GROUP = "in_group"
_ROLES = {
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), "root"),
    **dict.fromkeys(("send", "recv"), "peer"),
}
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""c10d::ReduceOp::RedOpType by number."""


def build_comms(
    nodes: pl.DataFrame,
    tensors: pl.DataFrame,
    named: pl.DataFrame,
    stats: list[Stat],
    in_groups: Mapping[int, str] | None = None,
) -> pl.DataFrame:
    """The comms of an execution trace; ``named`` holds the attributes that records carry since schema 1.1.0,
    ``in_groups`` the pg_name of nodes of which something else tells it."""
    calls = arrays.match_text(nodes["name"], lambda name: (name == COMM_RECORD) | name.str.contains(_C10D))
    text = nodes.filter(calls).select("id", pl.col("name", "op_schema", "inputs").cast(pl.String))
    sizes = _measure_sizes(tensors, text)
    described = functools.cache(_describe_call)  # most calls are repeated
    rows = {
        node: {**described(*call), **sizes.get(node, {}), "node": node} for node, *call in text.iter_rows()
    }
    for row in named.with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True):
        _apply_named_attributes(rows.setdefault(row["node"], {"node": row["node"]}), row)
    names = dict(text.select("id", "name").iter_rows())
    parents = nodes["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    for node in [node for node, name in names.items() if name == COMM_RECORD]:
        above = int(parents[node])
        for _ in range(8):
            if above < 0:
                break
            rows.pop(above, None)
            above = int(parents[above])
    for node, group in (in_groups or {}).items():
        if node in rows and not rows[node].get("pg_name"):
            rows[node]["pg_name"] = group
    members = dict(build_groups(read_group_config(nodes)).select("pg_name", "ranks").iter_rows())
    unplaced = [row.get("collective") for row in rows.values() if not _resolve_group_rank(row, members)]
    unplaced = [name for name in unplaced if re.match(_C10D, str(name))]
    if unplaced:
        example = (
            f"{unplaced[0]}: it counts ranks within its group, and does not say of which group it is: "
            "the other end, or the root, is not known (etloom collect --observer native records groups)"
        )
        stats.append(Stat("read.rank_within_unknown_group", "data_loss", len(unplaced), example))
    kept = [{key: row.get(key) for key in _COLUMNS} for _, row in sorted(rows.items())]
    return normalize_comms(pl.DataFrame(kept, schema=_COLUMNS), stats).with_row_index("id")


def read_group_config(nodes: pl.DataFrame) -> Any:
    """The process groups that the ``## process_group:init ##`` nodes hold as JSON in a string."""
    groups: list[Any] = []
    holders = arrays.match_text(
        nodes["name"], lambda name: name.str.contains("process_group:init", literal=True)
    )
    for text in nodes["inputs"].filter(holders).cast(pl.String):
        try:
            (config, *_) = load_json(text)
            found = _parse_group_config(config)
        except (TypeError, ValueError, RecursionError):
            continue
        groups += found if isinstance(found, list) else []
    return groups


def _parse_group_config(config: str) -> Any:
    """The value of a JSON list of objects; of one that was cut off, the objects that are whole."""
    try:
        return load_json(config)
    except ValueError:
        return load_json(f"{config.rpartition('}')[0]}}}]")


def _describe_call(name: str, op_schema: str | None, inputs: str | None) -> dict[str, Any]:
    values = _load_list(inputs)
    if name == COMM_RECORD:
        return _parse_positional_record(values)
    return {"collective": name, **_parse_by_schema(values, op_schema or "")}


def _parse_positional_record(values: list[Any]) -> dict[str, Any]:
    """([tensors], seq, group, rank, name, in_split, out_split, rank start, stride, size): the text is the landmark.

    The group is (name, description), or before schema 1.0.3 the address of the group. The rank, counted within the
    group, is the root, the other end of a message, or else the recording rank itself. seq may be (seq, is p2p).
    """
    at = next(
        (i for i, value in enumerate(values) if isinstance(value, str) and not value.startswith("<")), None
    )
    if at is None or at < 3:
        return {}
    group, seq = values[at - 2], values[at - 3]
    name, desc = [*group, None, None][:2] if isinstance(group, list) else (group, None)
    found: dict[str, Any] = {
        "collective": values[at],
        "seq": _to_int(seq[0] if isinstance(seq, list) and seq else seq),
        _IN_GROUP: _to_int(values[at - 1]),
        "pg_name": None if name is None else str(name),
        "pg_desc": desc if isinstance(desc, str) else None,
    }
    for key, split in zip(("in_split", "out_split"), values[at + 1 : at + 3], strict=False):
        found[key] = json.dumps(split) if isinstance(split, list) and split else None
    start, stride, size = ([_to_int(value) for value in values[at + 3 : at + 6]] + [None] * 3)[:3]
    return {**found, **_list_group_ranks(start, stride, size)}


def _resolve_group_rank(row: dict[str, Any], members: dict[str, str | None]) -> bool:
    """The root or the peer of a record: the global rank of the one it names within its group, where that is known.

    A c10d operator does not name its group: there all groups that have so many ranks must agree. Returns False for one
    that stays unknown.
    """
    role = _ROLES.get(categories.parse_collective(str(row.get("collective"))) or "")
    within = row.pop(_IN_GROUP, None)
    if role is None or within is None:
        return True
    group = row.get("pg_name")
    listed = [row.get("ranks") or members.get(group or "")] if group or row.get("ranks") else members.values()
    known = [_load_list(ranks) for ranks in listed]
    named = {_to_int(ranks[within]) for ranks in known if 0 <= within < len(ranks)}
    if len(named) != 1 or [] in known:
        return False
    row[role] = named.pop()
    return True


def _list_group_ranks(start: int | None, stride: int | None, size: int | None) -> dict[str, Any]:
    """The ranks of a group that lie evenly; start or stride 0 or -1 with more than one rank say nothing."""
    found: dict[str, Any] = {"group_size": size}
    if size is not None and start is not None and stride is not None and 0 < size <= 1 << 20 and start >= 0:
        if stride > 0:
            found["ranks"] = json.dumps(list(range(start, start + stride * size, stride)))
        elif size == 1:
            found["ranks"] = json.dumps([start])
    return found


def _parse_by_schema(values: list[Any], schema: str) -> dict[str, Any]:
    """What the arguments of a c10d operator say, by their names in its schema."""
    given = dict(zip(categories.parse_argument_names(schema), values, strict=False))
    reduce_op = _to_int(given.get("reduce_op"))
    within = (_to_int(given.get(name)) for name in ("root_rank", "root", "dst", "src"))
    return {
        _IN_GROUP: next((rank for rank in within if rank is not None), None),
        "is_async": given["async_op"] if isinstance(given.get("async_op"), bool) else None,
        "in_split": _encode_splits(given.get("input_split_sizes")),
        "out_split": _encode_splits(given.get("output_split_sizes")),
        "reduce_op": _REDUCE_OPS[reduce_op]
        if reduce_op is not None and 0 <= reduce_op < len(_REDUCE_OPS)
        else None,
    }


def _apply_named_attributes(found: dict[str, Any], row: dict[str, Any]) -> None:
    """The named attributes of a record override what its position said."""
    for key in ("collective", "pg_name", "pg_desc", "dtype", "in_nelems", "out_nelems"):
        if row[key] is not None:
            found[key] = row[key]
    for key in ("in_split", "out_split"):
        if row[key] not in (None, "[]"):
            found[key] = row[key]
    if row["is_async"] is not None:
        found["is_async"] = bool(row["is_async"])
    if row["group_size"] is not None:
        found.update(_list_group_ranks(row["rank_start"], row["rank_stride"], row["group_size"]))


def _measure_sizes(tensors: pl.DataFrame, calls: pl.DataFrame) -> dict[int, dict[str, Any]]:
    """Elements in and out of each call, and the type of its first tensor.

    A c10d operator is given what it writes as well, so there the names of its arguments tell; a message has one size,
    which is in and out, as NCCL's records have it.
    """
    known = {node: (name, schema or "") for node, name, schema, _ in calls.iter_rows()}
    names = functools.cache(categories.parse_argument_names)
    found: dict[int, dict[str, Any]] = {}
    mine = tensors.join(calls.select(node="id"), on="node", how="semi")
    rows = mine.select("node", "io", "index", "numel", pl.col("dtype").cast(pl.String))
    for node, io, index, numel, dtype in rows.iter_rows():
        row = found.setdefault(node, {"in_nelems": 0, "out_nelems": 0, "dtype": dtype})
        name, schema = known[node]
        arguments = names(schema) if schema else []
        if not arguments:
            sent, got = io == 0, io == 1
        elif io == 0:
            is_message = categories.parse_collective(name) in ("send", "recv")
            argument = arguments[index] if index < len(arguments) else ""
            sent, got = (True, True) if is_message else categories.get_tensor_directions(name, argument)
        else:
            continue  # the operator returns what it was given to write to
        row["in_nelems"] += (numel or 0) * sent
        row["out_nelems"] += (numel or 0) * got
    return found


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
