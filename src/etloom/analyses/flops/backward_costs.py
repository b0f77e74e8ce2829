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

from etloom.core.arrays import rows_of_ids
from etloom.core.nesting import find_nearest_ancestor
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
    units = _match_forward(trace, units, parent)
    if "forward_row" not in units.columns:
        return units
    supported = units.filter(pl.col("type").is_in(_DERIVED), pl.col("forward_row") >= 0)
    derived = _derive_costs(_join_forward_costs(supported))
    return (
        units.join(derived, on="unit", how="left", maintain_order="left")
        .with_columns(
            dtype=pl.when(pl.col("derived_flops").is_not_null()).then("derived_dtype").otherwise("dtype"),
            assumed=pl.coalesce("assumed", "derived_assumed"),
            flops=pl.coalesce("flops", "derived_flops"),
            model_flops=pl.coalesce("model_flops", "derived_model_flops"),
        )
        .drop(
            *("unit", "backward_row", "forward_row", "type"),
            *("derived_flops", "derived_model_flops", "derived_dtype", "derived_assumed"),
        )
    )


def _match_forward(trace: Trace, units: pl.DataFrame, parent: Rows) -> pl.DataFrame:
    """Add the columns unit (row number), backward_row, forward_row and type, which match backward with forward
    operators.

    Rows are -1 for none. Without backward operators the table is returned unchanged.

    backward_row is the enclosing backward operator; forward_row its forward operator or, for a unit of the forward
    pass, the enclosing operator that has a backward one.
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
    has_backward = np.zeros(events.height, np.bool_)
    has_backward[after] = True
    enclosing = find_nearest_ancestor(parent, has_backward, rows)
    return units.with_row_index("unit").with_columns(
        pl.Series("backward_row", backward),
        pl.Series("forward_row", np.where(backward >= 0, forward[backward], enclosing)),
        type=pl.coalesce(pl.when("costed").then("family"), "kernel_family"),
    )


def _join_forward_costs(units: pl.DataFrame) -> pl.DataFrame:
    """Return the backward operators without FLOPs, joined with the cost of their forward operator if that is a single
    product.

    Columns added: forward_flops, forward_dtype, forward_assumed, equal_head_sizes, observed_products (in the backward
    operator, in units of the forward cost) and is_only_unit (of the backward operator).
    """
    forward_costs = (
        units.filter(pl.col("backward_row") < 0)
        .group_by("forward_row")
        .agg(pl.len().alias("forward_products"), pl.col("type", "flops", "dtype", "dims", "assumed").first())
        .filter(pl.col("forward_products") == 1, pl.col("flops") > 0)
        .select(
            "forward_row",
            "type",
            forward_flops="flops",
            forward_dtype="dtype",
            forward_assumed="assumed",
            equal_head_sizes=pl.col("dims").map_elements(_have_equal_head_sizes, pl.Boolean),
        )
    )
    products = pl.coalesce(pl.col("flops") / pl.col("forward_flops"), pl.col("products").cast(pl.Float64))
    return (
        units.filter(pl.col("backward_row") >= 0)
        .join(forward_costs, on=["forward_row", "type"])
        .with_columns(products=pl.when("costed").then(1).otherwise("products"))
        .with_columns(
            observed_products=products.sum().over("backward_row"),
            is_only_unit=pl.len().over("backward_row") == 1,
        )
        .filter(pl.col("flops").is_null())
    )


def _derive_costs(units: pl.DataFrame) -> pl.DataFrame:
    """Derive the FLOPs and dtype of backward operators from the costs of their forward operators; omit those without a
    rule.

    Columns: unit, derived_flops, derived_model_flops, derived_dtype, derived_assumed.
    """
    kind, only, forward_flops = pl.col("type"), pl.col("is_only_unit"), pl.col("forward_flops")
    is_gemm = (kind == "gemm") & (pl.col("products") > 0) & (pl.col("observed_products") <= _MAX_PRODUCTS)
    is_attention = (kind == "attention") & pl.col("equal_head_sizes") & only
    is_convolution = (kind == "convolution") & (pl.col("gradients") > 0) & only

    def derive(attention_flops: pl.Expr) -> pl.Expr:
        return (
            pl.when(is_gemm)
            .then(pl.col("products") * forward_flops)
            .when(is_convolution)
            .then(pl.col("gradients") * forward_flops)
            .when(is_attention)
            .then(attention_flops)
        )

    return units.select(
        "unit",
        derive(forward_flops * 5 // 2).alias("derived_flops"),
        derive(forward_flops * 2).alias("derived_model_flops"),
        derived_dtype="forward_dtype",
        derived_assumed="forward_assumed",
    ).drop_nulls("derived_flops")


def _have_equal_head_sizes(dims: str) -> bool:
    """Return whether queries, keys and values, the first three shapes with heads in ``dims``, have one head size."""
    shapes = [shape for shape in json.loads(dims) if isinstance(shape, list) and len(shape) > 2][:3]
    return len(shapes) == 3 and len({shape[-1] for shape in shapes}) == 1
