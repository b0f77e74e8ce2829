"""Sizes of the input and output tensors of recorded communication calls.

A c10d operator takes both as arguments, which its schema names (output_tensors, input_tensors, tensors); PyTorch's
record_param_comms records them as inputs and outputs.
"""

from __future__ import annotations

import polars as pl

from etloom.core import categories
from etloom.core.trace import Trace

Sizes = tuple[tuple[int, ...], tuple[int, ...]]


def tensor_sizes(trace: Trace, nodes: pl.Series) -> dict[int, Sizes]:
    """Return node -> (elements of each input tensor, elements of each output tensor), ordered by argument and place."""
    tensors = trace.tensors.join(nodes.to_frame("node").unique(), on="node", how="semi").sort(
        "node", "io", "index", "item"
    )
    descriptions = trace.nodes.join(nodes.to_frame("id").unique(), on="id", how="semi").select(
        "id", pl.col("name", "op_schema").cast(pl.String)
    )
    name_and_schema = {node: (name or "", schema or "") for node, name, schema in descriptions.iter_rows()}
    sizes: dict[int, Sizes] = {}
    grouped = tensors.group_by("node", maintain_order=True).agg("io", "index", "numel")
    for node, directions, arguments, elements in grouped.iter_rows():
        rows = [row for row in zip(directions, arguments, elements, strict=True) if row[2] is not None]
        name, schema = name_and_schema[node]
        sizes[node] = _sizes_by_schema(rows, name, schema) if schema else _sizes_as_recorded(rows)
    return sizes


def _sizes_as_recorded(rows: list[tuple[int, int, int]]) -> Sizes:
    inputs, outputs = (tuple(size for direction, _, size in rows if direction == side) for side in (0, 1))
    return inputs, outputs


def _sizes_by_schema(rows: list[tuple[int, int, int]], name: str, schema: str) -> Sizes:
    arguments = categories.parse_argument_names(schema)
    inputs: list[int] = []
    outputs: list[int] = []
    for direction, index, size in rows:
        if direction != 0:
            continue
        argument = arguments[index] if index < len(arguments) else ""
        is_sent, is_received = categories.get_tensor_directions(name, argument)
        inputs += [size] if is_sent else []
        outputs += [size] if is_received else []
    return tuple(inputs), tuple(outputs)
