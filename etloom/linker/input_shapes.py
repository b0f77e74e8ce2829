"""Compare the input shapes that both files recorded, to distinguish iterations that call the same operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace
from etloom.linker.placement import get_ids


def count_equal_shapes(trace: Trace, node: np.ndarray, event: np.ndarray) -> int:
    """Return the number of (node, event) pairs with equal input shapes; 0 if a file has no shapes.

    ``node``, ``event``: rows of the pairs.

    Scalars are ignored: Kineto writes one shape, [], for a number and for a tensor without dimensions.
    """
    pairs = pl.DataFrame({"node": get_ids(trace.nodes, node), "event": get_ids(trace.events, event)})
    node_shapes = (
        trace.tensors.filter((pl.col("io") == 0) & pl.col("shape").is_not_null())
        .join(pairs.select("node"), on="node", how="semi")
        .sort("node", "index", "item", maintain_order=True)
        .with_columns(pl.col("shape").cast(pl.String).str.replace_all(" ", ""))
        .filter(pl.col("shape") != "[]")
        .group_by("node")
        .agg(pl.col("shape").str.join(";"))
    )
    event_shapes = parse_distinct(
        trace.arguments.select("event", "dims").join(pairs.select("event"), on="event", how="semi"),
        "dims",
        lambda dims: ";".join(_flatten_shapes(dims)),
        pl.String,
    ).filter(pl.col("dims") != "")
    both = pairs.join(node_shapes, on="node").join(event_shapes, on="event")
    return int((both["shape"] == both["dims"]).sum())


def _flatten_shapes(dims: Any) -> list[str]:
    """Return the shapes in nested lists as a flat list of texts such as "[2,3]", without empty shapes."""
    if not isinstance(dims, list) or not dims:
        return []
    if all(isinstance(size, int) for size in dims):
        return ["[" + ",".join(map(str, dims)) + "]"]
    return [shape for part in dims for shape in _flatten_shapes(part)]
