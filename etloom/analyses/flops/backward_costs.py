"""Flops of backward operators without recorded shapes, derived from their forward operators.

A profile may contain only the shapes of the forward pass: with a custom autograd function that launches its kernels
itself, a compiled or captured backward, or an execution trace that ends before it. Autograd's sequence number connects
each backward operator to its forward operator (thread dependencies of kind fwd_bwd), which determines:

- For a matrix product (m, k) x (k, n), each gradient is one product with the same m n k. So every product observed in
  the backward operator, as an operator (aten::mm) or a kernel, costs as much as forward; there are at most two.
- Each gradient of a convolution costs as much as forward. Their number (a frozen weight has none, nor has the input
  image of a network) is known if the kernel names show it: dgrad, wgrad.
- For fused attention with keys and values of equal size, backward is five products and forward two; one of the five,
  the scores, is recomputed.

If forward was several products, if backward shows more products than possible, or if the purpose of some kernel of a
convolution is unknown, no flops are derived. Bytes are not derived.
"""

from __future__ import annotations

import json

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.arrays import find_nearest_ancestor, rows_of_ids
from etloom.core.trace import Trace

Rows = NDArray[np.int64]
_DERIVED = ("gemm", "attention", "convolution")
_MAX_PRODUCTS = 2
"""Gradients of the two factors of a matrix product."""


def derive_backward_costs(trace: Trace, units: pl.DataFrame, parent: Rows) -> pl.DataFrame:
    """Fill in missing flops, model_flops and dtype of backward operators.

    Args:
        trace: The trace of a rank.
        units: row, costed, family, kernel_family, products, gradients, flops, model_flops, dtype, dims.
        parent: Row of the parent of each event.

    Returns:
        units with the costs that follow from the forward operators.
    """
    joins = trace.thread_dependencies.filter(pl.col("kind") == "fwd_bwd")
    events, rows = trace.events, units["row"].to_numpy()
    after, event = rows_of_ids(events, joins["after"]), rows_of_ids(events, joins["event"])
    after, event = after[(after >= 0) & (event >= 0)], event[(after >= 0) & (event >= 0)]
    if not after.size:
        return units
    forward = np.full(events.height, -1, np.int64)
    forward[event] = after
    backward = find_nearest_ancestor(parent, forward >= 0, rows)
    first = np.zeros(events.height, np.bool_)
    first[after] = True
    units = units.with_row_index("unit").with_columns(
        pl.Series("backward", backward),
        of=pl.Series(np.where(backward >= 0, forward[backward], find_nearest_ancestor(parent, first, rows))),
        sort=pl.coalesce(pl.when("costed").then("family"), "kernel_family"),
    )
    matrix = units.filter(pl.col("sort").is_in(_DERIVED), pl.col("of") >= 0)
    forward_costs = (
        matrix.filter(pl.col("backward") < 0)
        .group_by("of")
        .agg(pl.len().alias("products_done"), pl.col("sort", "flops", "dtype", "dims").first())
        .filter(pl.col("products_done") == 1, pl.col("flops") > 0)
        .select(
            "of",
            "sort",
            done="flops",
            done_in="dtype",
            square=pl.col("dims").map_elements(_square, pl.Boolean),
        )
    )
    missing = (
        matrix.filter(pl.col("backward") >= 0)
        .join(forward_costs, on=["of", "sort"])
        .with_columns(
            known=pl.col("flops") / pl.col("done"),
            products=pl.when("costed").then(1).otherwise("products"),
        )
        .with_columns(
            shown=pl.coalesce("known", pl.col("products").cast(pl.Float64)).sum().over("backward"),
            alone=pl.len().over("backward") == 1,
        )
        .filter(pl.col("flops").is_null())
    )
    gemm = (pl.col("sort") == "gemm") & (pl.col("products") > 0) & (pl.col("shown") <= _MAX_PRODUCTS)
    attention = (pl.col("sort") == "attention") & pl.col("square") & pl.col("alone")
    convolution = (pl.col("sort") == "convolution") & (pl.col("gradients") > 0) & pl.col("alone")
    derived = missing.select(
        "unit",
        *(
            pl.when(gemm)
            .then(pl.col("products") * pl.col("done"))
            .when(convolution)
            .then(pl.col("gradients") * pl.col("done"))
            .when(attention)
            .then(attention_cost)
            .alias(name)
            for name, attention_cost in (
                ("of_flops", pl.col("done") * 5 // 2),
                ("of_model", pl.col("done") * 2),
            )
        ),
        of_dtype="done_in",
    ).drop_nulls("of_flops")
    return (
        units.join(derived, on="unit", how="left", maintain_order="left")
        .with_columns(
            dtype=pl.when(pl.col("of_flops").is_not_null()).then("of_dtype").otherwise("dtype"),
            flops=pl.coalesce("flops", "of_flops"),
            model_flops=pl.coalesce("model_flops", "of_model"),
        )
        .drop("unit", "backward", "of", "sort", "of_flops", "of_model", "of_dtype")
    )


def _square(dims: str) -> bool:
    """Return whether queries, keys and values, the first three arguments, have one head size."""
    shapes = json.loads(dims)[:3]
    return (
        len(shapes) == 3
        and len({shape[-1] if isinstance(shape, list) and shape else None for shape in shapes}) == 1
    )
