"""Input shapes that both files recorded, to tell iterations apart that call the same operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.linker.lanes import ids
from etloom.schema import parse_distinct
from etloom.trace import Trace


def agreeing(trace: Trace, node: np.ndarray, event: np.ndarray) -> int:
    """Of pairs of rows of nodes and events, how many have the same input shapes; 0 where a file has none.

    Scalars are left out: Kineto writes one shape, [], for a number and for a tensor without dimensions.
    """
    pairs = pl.DataFrame({"node": ids(trace.nodes, node), "event": ids(trace.events, event)})
    of_nodes = (
        trace.tensors.filter((pl.col("io") == 0) & pl.col("shape").is_not_null())
        .join(pairs.select("node"), on="node", how="semi")
        .sort("node", "index", "item", maintain_order=True)
        .with_columns(pl.col("shape").cast(pl.String).str.replace_all(" ", ""))
        .filter(pl.col("shape") != "[]")
        .group_by("node")
        .agg(pl.col("shape").str.join(";"))
    )
    of_events = parse_distinct(
        trace.arguments.select("event", "dims").join(pairs.select("event"), on="event", how="semi"),
        "dims",
        lambda dims: ";".join(_shapes(dims)),
        pl.String,
    ).filter(pl.col("dims") != "")
    both = pairs.join(of_nodes, on="node").join(of_events, on="event")
    return int((both["shape"] == both["dims"]).sum())


def _shapes(dims: Any) -> list[str]:
    """The shapes in a nest of lists, as text; what has no dimensions is left out."""
    if not isinstance(dims, list) or not dims:
        return []
    if all(isinstance(size, int) for size in dims):
        return ["[" + ",".join(map(str, dims)) + "]"]
    return [shape for part in dims for shape in _shapes(part)]
