"""The sizes of the tensors that a recorded communication call was given: its inputs and its outputs.

A c10d operator takes both as arguments, which its schema names (output_tensors, input_tensors, tensors); PyTorch's
record_param_comms holds them as what they are.
"""

from __future__ import annotations

import polars as pl

from etloom.core import categories
from etloom.core.trace import Trace

Sizes = tuple[tuple[int, ...], tuple[int, ...]]


def tensor_sizes(trace: Trace, nodes: pl.Series) -> dict[int, Sizes]:
    """node -> (elements of each input tensor, of each output tensor), in order of argument and place."""
    tensors = trace.tensors.join(nodes.to_frame("node").unique(), on="node", how="semi").sort(
        "node", "io", "index", "item"
    )
    known = trace.nodes.join(nodes.to_frame("id").unique(), on="id", how="semi").select(
        "id", pl.col("name", "op_schema").cast(pl.String)
    )
    described = {node: (name or "", schema or "") for node, name, schema in known.iter_rows()}
    found: dict[int, Sizes] = {}
    grouped = tensors.group_by("node", maintain_order=True).agg("io", "index", "numel")
    for node, io, index, numel in grouped.iter_rows():
        rows = [(one, at, size) for one, at, size in zip(io, index, numel, strict=True) if size is not None]
        name, schema = described[node]
        found[node] = _by_schema(rows, name, schema) if schema else _as_recorded(rows)
    return found


def _as_recorded(rows: list[tuple[int, int, int]]) -> Sizes:
    ins, outs = (tuple(size for io, _, size in rows if io == which) for which in (0, 1))
    return ins, outs


def _by_schema(rows: list[tuple[int, int, int]], name: str, schema: str) -> Sizes:
    names = categories.parse_argument_names(schema)
    ins: list[int] = []
    outs: list[int] = []
    for io, at, size in rows:
        if io != 0:
            continue
        sent, got = categories.get_tensor_directions(name, names[at] if at < len(names) else "")
        ins += [size] if sent else []
        outs += [size] if got else []
    return tuple(ins), tuple(outs)
