"""The nodes of an execution trace as JSON values again, from the tables that a reader made of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import polars as pl

from etloom.trace import Trace

Tensor = tuple[list[Any], Any, Any]  # value [id, storage, offset, numel, itemsize, device], shape, stride

_ATTRIBUTES = (
    ("rf_id", "uint64", 0),
    ("fw_parent", "uint64", 0),
    ("seq_id", "int64", -1),
    ("scope", "uint64", 0),
    ("tid", "uint64", 0),
    ("fw_tid", "uint64", 0),
    ("op_schema", "string", ""),
    ("kernel_backend", "string", ""),
    ("kernel_file", "string", ""),
)
"""Name, type and what stands for none, in PyTorch's order."""

_COMM_ATTRIBUTES = (
    ("collective_name", "string", "collective"),
    ("dtype", "string", "dtype"),
    ("in_msg_nelems", "uint64", "in_nelems"),
    ("out_msg_nelems", "uint64", "out_nelems"),
    ("in_split_size", "string", "in_split"),
    ("out_split_size", "string", "out_split"),
    ("pg_name", "string", "pg_name"),
    ("pg_desc", "string", "pg_desc"),
    ("pg_size", "uint64", "group_size"),
)


def nodes(trace: Trace) -> Iterator[tuple[int, str]]:
    """(row id, JSON text but for its closing brace) of every node, in order of node ids.

    The layout is that of the schemas 1.0.2 to 1.1.1. What repeats from node to node is written once and kept.
    """
    tensors = _tensors(trace.tensors)
    comms = {
        row["node"]: row
        for row in _plain(trace.comms.filter(pl.col("node").is_not_null())).iter_rows(named=True)
    }
    et_ids = dict(trace.nodes.select("id", "et_id").iter_rows())
    quoted = cache(json.dumps)

    @cache
    def without_tensors(values: str | None, types: str | None) -> str:
        return json.dumps(_side(values, types, {}))

    def side(key: tuple[int, int], values: str | None, types: str | None) -> str:
        known = tensors.get(key)
        return without_tensors(values, types) if known is None else json.dumps(_side(values, types, known))

    front = [
        f'{{"name": "{name}", "type": "{kind}", "value": {{}}}}'.replace("{}", "\0")
        for name, kind, _ in _ATTRIBUTES
    ]
    columns = ("id", "et_id", "name", "parent", "recorded_parent", "inputs", "input_types", "outputs")
    listed = _plain(trace.nodes).select(*columns, "output_types", "attrs", *(one[0] for one in _ATTRIBUTES))
    for (
        key,
        et_id,
        name,
        parent,
        recorded,
        ins,
        in_types,
        outs,
        out_types,
        rest,
        *values,
    ) in listed.iter_rows():
        attrs = [
            text.replace("\0", quoted(none if value is None else value))
            for text, value, (_, _, none) in zip(front, values, _ATTRIBUTES, strict=True)
        ]
        if key in comms or rest:
            attrs += [json.dumps(one) for one in _more_attributes(rest, comms.get(key))]
        yield (
            key,
            f'{{"id": {et_id}, "name": {quoted(name)}, "ctrl_deps": {quoted(et_ids.get(parent, recorded))}, '
            f'"inputs": {side((key, 0), ins, in_types)}, "outputs": {side((key, 1), outs, out_types)}, '
            f'"attrs": [{", ".join(attrs)}]',
        )


def side_of(trace: Trace, node: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs and outputs of one node, by row id."""
    row = _plain(trace.nodes.filter(pl.col("id") == node)).row(0, named=True)
    tensors = _tensors(trace.tensors.filter(pl.col("node") == node))
    return (
        _side(row["inputs"], row["input_types"], tensors.get((node, 0), {})),
        _side(row["outputs"], row["output_types"], tensors.get((node, 1), {})),
    )


def empty_side() -> dict[str, Any]:
    return {"values": [], "shapes": [], "types": [], "strides": []}


def attribute(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "value": value}


def _more_attributes(rest: str | None, comm: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if comm is not None:
        for name, kind, column in _COMM_ATTRIBUTES:
            if comm[column] is not None:
                yield attribute(name, kind, comm[column])
    for name, value in json.loads(rest or "{}").items():
        yield attribute(name, "string" if isinstance(value, str) else "int64", value)


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))


def _tensors(frame: pl.DataFrame) -> dict[tuple[int, int], dict[tuple[int, int | None], Tensor]]:
    """(node, io) -> (index, item) -> tensor. Shapes are parsed once a distinct text."""
    texts: dict[str | None, Any] = {None: []}
    for column in ("shape", "stride"):
        texts |= {text: json.loads(text) for text in frame[column].unique().drop_nulls().cast(pl.String)}
    found: dict[tuple[int, int], dict[tuple[int, int | None], Tensor]] = defaultdict(dict)
    value = ("tensor_id", "storage_id", "offset", "numel", "itemsize", "device")
    columns = _plain(frame).select("node", "io", "index", "item", "shape", "stride", *value)
    for node, io, index, item, shape, stride, *numbers, device in columns.iter_rows():
        tensor = ([*numbers, device or ""], texts[shape], texts[stride])
        found[node, io][index, item] = tensor
    return found


def _side(
    values: str | None, types: str | None, tensors: dict[tuple[int, int | None], Tensor]
) -> dict[str, Any]:
    side = empty_side()
    side["types"] = json.loads(types or "[]")
    for index, value in enumerate(json.loads(values or "[]")):
        count = iter(range(1 << 31))

        def filled(value: Any, index: int = index, count: Iterator[int] = count, top: bool = True) -> Tensor:
            if value is None:
                known = tensors.get((index, None if top else next(count)))
                return known if known is not None else ([], [], [])
            if isinstance(value, list):
                parts = [filled(part, index, count, False) for part in value]
                return ([part[0] for part in parts], [part[1] for part in parts], [part[2] for part in parts])
            return (value, [], [])

        whole = filled(value)
        for name, part in zip(("values", "shapes", "strides"), whole, strict=True):
            side[name].append(part)
    return side
