"""Calls of a trace with their cost: which operators are counted, their cost, and their device time.

Of nested operators, the outermost one with a formula is counted, including all kernels launched by it or its callees.
Each replay of a device graph is a call of the operators that its capture recorded.
In a trace with GPU activity, only operators that launched some are counted. If Kineto did not record the shapes, those
of the execution trace are used, through the links.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.flops.backward_costs import derive_backward_costs
from etloom.analyses.flops.call_context import find_context
from etloom.analyses.flops.call_costs import add_costs, compute_node_costs
from etloom.analyses.flops.formulas import FAMILIES, find_entry, infer_kernel_family
from etloom.analyses.flops.xla_costs import add_operation_costs, find_runs, has_operations
from etloom.analyses.helpers import require_linked
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.analyses.recompute import find_recomputed
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.names import list_user_files
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, select_device_events

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
FAMILY = pl.Enum(FAMILIES)
_BUS = r"HtoD|DtoH|Pinned|Pageable|PtoP|HostToDevice|DeviceToHost"
_SPLIT_K_SUM = r"(?i)split_?k_?reduce|reduce_?split_?k"
"""Kernels that sum the parts of a product split along k; they are gemm but not a product."""
_TF32 = r"(?i)tf32|s1688|nvjet_s"
_INPUT_GRADIENT, _WEIGHT_GRADIENT = r"(?i)dgrad|igemm_bwd", r"(?i)wgrad|igemm_wrw"
"""The gradient of a convolution that a kernel computes, as named by cuDNN, CUTLASS and MIOpen."""
_LAYOUT = r"nchwToNhwc|nhwcToNchw"
_PACKED = r"(?i)e2m1|w4a|(?:^|[^a-z])(?:mx|nv)?(?:fp|int)4|xmxfp4"
"""Matrix products with 4-bit weights."""


def count_calls(trace: Trace) -> pl.DataFrame:
    """Return one row per operator call that has a cost formula or launches GPU activity, and per kernel of unknown
    operator.

    Returns:
        row (of the operator in events, -1 if unknown), replay (id of the launch of a captured operator, or of the first
        kernel of an XLA operation; else -1), name, family, step, known (has a cost), flops, bytes, assumed (what the
        cost assumes), model_flops (0 if activation checkpointing recomputed it), dtype, tf32 (float arithmetic in TF32,
        by kernel names), bus (it copied from or to the host, or another device), kernels, time_ns (time in which its
        GPU activity ran; basis host: its duration, or self time without a cost), basis, dims, types. Communication is
        excluded. For an execution trace alone: its counted operators, without times (basis none).

    Raises:
        AnalysisError: No shapes were recorded.
    """
    require_linked(trace)
    events = trace.events
    if not events.height and trace.nodes.height:
        return _check_costs(trace, _make_node_units(trace))
    parent = rows_of_ids(events, events["parent"])
    counted = _select_counted(events["name"], _mask_operators(events), parent)
    if select_device_events(trace).height:
        work = assign_kernels(trace, parent, counted)
        units = _group_by_call(work.filter(pl.col("kind") != "communication"))
    else:
        units = _make_host_units(events, parent, counted)
    rows = units["row"].to_numpy()
    costed = (rows >= 0) & counted[rows]
    recomputed = _mask_recomputed(trace, parent)
    own_step = (
        pl.when(pl.col("cat").cast(pl.String) != categories.CAPTURED_OPERATOR).then("step").alias("own_step")
    )
    units = units.hstack(take_rows(events.select("id", "name", own_step), rows)).with_columns(
        pl.Series("costed", costed), pl.Series("recomputed", costed & recomputed[rows])
    )
    units = units.with_columns(find_context(trace, units, parent))
    units = _check_costs(trace, add_operation_costs(trace, add_costs(trace, units)))
    units = derive_backward_costs(trace, units, parent).drop("products", "gradients")
    return units.with_columns(
        known=pl.col("flops").is_not_null() | pl.col("bytes").is_not_null(),
        family=pl.when("costed").then("family").otherwise("kernel_family"),
        step=pl.when(pl.col("costed") & (pl.col("replay") < 0))
        .then("own_step")
        .otherwise(pl.coalesce("own_step", "step")),
        model_flops=pl.when("recomputed").then(0).otherwise("model_flops"),
    ).filter(~pl.col("family").cast(pl.String).str.ends_with("communication"))


_EXTREMES = ("aten::min", "aten::max")
_TWO = r"^\[\[[^\[\]]*\], ?\[[^\[\]]*\]\]$"
"""Dimensions of two arguments: then these operators compare two tensors instead of reducing one."""


def _check_costs(trace: Trace, units: pl.DataFrame) -> pl.DataFrame:
    """Add the columns `known` and `family`; raise AnalysisError if no cost is known."""
    units = units.with_columns(known=pl.col("flops").is_not_null() | pl.col("bytes").is_not_null())
    if not units["known"].any():
        raise _explain_missing_costs(trace, units)
    families = lookup_families(units["name"])
    if "dims" in units.columns:
        dims = units["dims"].cast(pl.String)
        is_pairwise = units["name"].cast(pl.String).is_in(_EXTREMES) & dims.str.contains(_TWO).fill_null(
            False
        )
        families = families.set(is_pairwise, "elementwise")
    return units.with_columns(families)


def _explain_missing_costs(trace: Trace, units: pl.DataFrame) -> AnalysisError:
    with_shapes = units.drop_nulls(["dims", "name"]) if "dims" in units.columns else units.clear()
    if with_shapes.is_empty():
        return AnalysisError(
            "no operator that ran has recorded shapes",
            where=describe_rank(trace),
            remedy="profile with record_shapes=True, or add the run's execution trace to the folder",
        )
    counts = with_shapes.group_by("name").len().sort("len", "name", descending=(True, False))
    names = ", ".join(counts["name"].cast(pl.String).head(3))
    return AnalysisError(
        f"shapes are recorded, but FLOPs and bytes of no operator that ran are known ({names}"
        f"{', ...' if counts.height > 3 else ''})",
        where=describe_rank(trace),
        remedy="docs/flops.md lists the operators with a formula; etloom analyze kernel-families needs no shapes",
    )


def lookup_families(names: pl.Series) -> pl.Series:
    """Return the family (such as gemm) of each operator name, null if the operator has no cost formula."""
    distinct = names.unique().to_frame("text")
    families = [entry.family if name and (entry := find_entry(name)) else None for name in distinct["text"]]
    distinct = distinct.with_columns(pl.Series("family", families, dtype=FAMILY))
    joined = names.to_frame("text").join(
        distinct, on="text", how="left", maintain_order="left", nulls_equal=True
    )
    return joined["family"]


def assign_kernels(trace: Trace, parent: Rows | None = None, counted: Mask | None = None) -> pl.DataFrame:
    """Return GPU activities with the counted operator call that each belongs to.

    Returns:
        id, kind, name, step, ts, dur, end, row (of the call in events, else of the launching operator, -1 if unknown),
        replay (id of the launch of a device graph whose captured operator that is, or of the first kernel of an XLA
        operation; else -1),
        kernel_family, tf32, bus, product (the kernel is a whole product, if its family is gemm), gradient (of a
        convolution: "input", "weight", "" for a computing kernel of unknown gradient, null for others).

    Raises:
        AnalysisError: The trace has no GPU activity.
    """
    work = select_launched_work(trace, "id", "kind", "name", "step", "ts", "dur", "end", "operator", "launch")
    names = work.select("kind", "name").unique().sort("kind", "name")
    texts = names.select(pl.all().cast(pl.String)).rows()
    names = names.hstack(_classify_names(tuple(texts), list_user_files()))
    work = work.join(names, on=["kind", "name"], how="left", maintain_order="left")
    if parent is None or counted is None:
        parent = rows_of_ids(trace.events, trace.events["parent"])
        counted = _select_counted(trace.events["name"], _mask_operators(trace.events), parent)
    around = rows_of_ids(trace.events, work["operator"])
    owner = nesting.find_nearest_ancestor(parent, counted, around)
    captured = categories.mask_events(trace.events, (categories.CAPTURED_OPERATOR,))
    launch = arrays.to_array(work["launch"], 0).astype(np.int64)
    replay = np.where((around >= 0) & captured[around], launch, -1)
    row = np.where(owner >= 0, owner, around)
    if has_operations(trace):
        runs = find_runs(trace, work)
        is_operation = (runs >= 0) & (owner < 0)
        row, replay = np.where(is_operation, -1, row), np.where(is_operation, runs, replay)
    return work.drop("operator", "launch").with_columns(pl.Series("row", row), pl.Series("replay", replay))


@lru_cache(maxsize=64)
def _classify_names(names: tuple[tuple[str, str], ...], user_files: tuple[str, ...]) -> pl.DataFrame:
    """Return the properties that the names of GPU activities show: kernel family, TF32, bus transfer, type of gradient.

    Args:
        names: kind and name of each.
        user_files: files of names that apply.
    """
    name = pl.col("name")
    return (
        pl.DataFrame(names, schema={"kind": pl.String, "name": pl.String}, orient="row")
        .select(
            kernel_family=infer_kernel_family(pl.col("kind"), name).cast(FAMILY),
            tf32=name.str.contains(_TF32),
            product=~name.str.contains(_SPLIT_K_SUM),
            bus=name.str.contains(_BUS),
            packed=name.str.contains(_PACKED),
            gradient=pl.when(name.str.contains(_INPUT_GRADIENT))
            .then(pl.lit("input"))
            .when(name.str.contains(_WEIGHT_GRADIENT))
            .then(pl.lit("weight"))
            .when(~name.str.contains(f"{_SPLIT_K_SUM}|{_LAYOUT}"))
            .then(pl.lit("")),
        )
        .with_columns(
            pl.when(pl.col("kernel_family").is_in(["gemm", "convolution"])).then("gradient"),
            packed=pl.col("packed") & (pl.col("kernel_family") == "gemm"),
        )
    )


def _mask_operators(events: pl.DataFrame) -> Mask:
    """Return a mask of the events that are operators with a duration, or captured in a device graph."""
    mask: Mask = categories.mask_events(events, categories.OPERATOR_CATEGORIES) & arrays.is_present(
        events["dur"]
    )
    mask |= categories.mask_events(events, (categories.CAPTURED_OPERATOR,))
    return mask


def _select_counted(names: pl.Series, operators: Mask, parent: Rows) -> Mask:
    """Return a mask of the operators whose flops are counted, so that no operator is counted within another."""
    pairs = ((name, find_entry(name)) for name in names.unique().drop_nulls().cast(pl.String))
    entries = {name: entry for name, entry in pairs if entry}
    plain = [name for name, entry in entries.items() if not entry.composite]
    composite = [name for name, entry in entries.items() if entry.composite]
    parts = arrays.is_in(names, [name for name, entry in entries.items() if entry.part])
    counted: Mask = operators & arrays.is_in(names, plain)
    composites: Mask = operators & arrays.is_in(names, composite)
    rows = np.flatnonzero(counted)
    counted[rows[nesting.find_nearest_ancestor(parent, counted, _above(parent, rows)) >= 0]] = False
    rows = np.flatnonzero(composites)
    composites[rows[nesting.find_nearest_ancestor(parent, counted, rows) >= 0]] = False
    # A composite operator that encloses a counted one (composite or not) is covered by that one.
    climbing = _above(parent, np.flatnonzero((counted & ~parts) | composites))
    around = np.zeros(len(names), dtype=np.bool_)
    while climbing.size:
        rows_around = np.unique(nesting.find_nearest_ancestor(parent, composites & ~around, climbing))
        rows_around = rows_around[rows_around >= 0]
        around[rows_around] = True
        climbing = _above(parent, rows_around)
    composites &= ~around
    rows = np.flatnonzero(counted & parts)
    counted[rows[nesting.find_nearest_ancestor(parent, composites, rows) >= 0]] = False
    return counted | composites


def _mask_recomputed(trace: Trace, parent: Rows) -> Mask:
    """Return a mask of the events inside an operator that activation checkpointing runs again."""
    events = trace.events
    operators = categories.mask_events(events, categories.OPERATOR_CATEGORIES) & arrays.is_present(
        events["depth"]
    )
    backward = operators & (arrays.to_array(events["fwd_tid"], 0) > 0)
    again = np.zeros(events.height, dtype=np.bool_)
    if not backward.any():
        return again
    again[find_recomputed(trace, parent, operators, backward)[0]] = True
    if not again.any():
        return again
    inside: Mask = nesting.find_nearest_ancestor(parent, again, np.arange(events.height)) >= 0
    return inside


def _above(parent: Rows, rows: Rows) -> Rows:
    above: Rows = parent[rows]
    return above


def _group_by_call(work: pl.DataFrame) -> pl.DataFrame:
    """Sum kernels by operator call (or run of an XLA operation): return one row per call, and one per kernel whose call
    is unknown.

    Returns:
        row, replay, step, kernel_family (of the longest kernel), kernels, time_ns, tf32, bus, products (number of
        kernels that are matrix products), gradients (of a convolution; 0 if the kernel names do not show it), basis.
    """
    # Without known operator, each kernel is a unit of its own.
    is_single = (pl.col("row") < 0) & (pl.col("replay") < 0)
    kernel_id = pl.when(is_single).then(pl.col("id").cast(pl.Int64)).otherwise("replay")
    work = work.with_columns(kernel=kernel_id).sort("row", "kernel", "ts")
    row, kernel_ids = work["row"].to_numpy(), work["kernel"].to_numpy()
    start, end = work["ts"].to_numpy(), work["end"].to_numpy()
    begins = np.flatnonzero(
        np.append(True, (row[1:] != row[:-1]) | (kernel_ids[1:] != kernel_ids[:-1]))[: row.size]
    )
    group = np.repeat(np.arange(begins.size), np.diff(np.append(begins, row.size)))
    # Union of intervals: a kernel that starts before the latest end of its group only adds the time after that end. The
    # running maximum is computed on the ranks of the ends, offset by group, because offset times would overflow.
    order = np.argsort(end, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    latest = end[order][np.maximum.accumulate(rank + group * order.size) - group * order.size]
    before = np.append(0, latest[:-1])
    before[begins] = start[begins]
    added = np.clip(end - np.maximum(start, before), 0, None)
    sides = pl.col("gradient").replace("", None).drop_nulls().n_unique()
    gradients_certain = (pl.col("gradient") != "").all()
    return (
        work.with_columns(pl.Series("group", group), pl.Series("added_ns", added))
        .group_by("group", maintain_order=True)
        .agg(
            pl.col("row", "replay", "step").first(),
            pl.col("kernel_family").get(pl.col("dur").arg_max()),
            pl.len().cast(pl.Int64).alias("kernels"),
            pl.col("added_ns").sum().alias("time_ns"),
            pl.col("tf32", "bus", "packed").any(),
            (pl.col("product") & (pl.col("kernel_family") == "gemm")).sum().cast(pl.Int64).alias("products"),
            # A kernel of unknown gradient may belong to either: the number is only certain if both were observed.
            pl.when((sides == 2) | gradients_certain)
            .then(sides.cast(pl.Int64))
            .otherwise(0)
            .alias("gradients"),
        )
        .drop("group")
        .with_columns(basis=pl.lit("device"))
    )


def _make_host_units(events: pl.DataFrame, parent: Rows, counted: Mask) -> pl.DataFrame:
    """Return one row, with host time, per operator that is counted or inside no counted operator; for a trace without
    GPU."""
    self_time = nesting.compute_exclusive_time(events, operators_only=True).to_numpy()
    operators = _mask_operators(events)
    inside = nesting.find_nearest_ancestor(parent, counted, np.arange(events.height)) >= 0
    is_communication = arrays.match_text(events["name"], categories.COMMUNICATION_CALL)
    rows = np.flatnonzero(operators & (counted | ~inside))
    return pl.DataFrame(
        {
            "row": rows,
            "replay": np.full(rows.size, -1),
            "step": events["step"][rows],
            "kernel_family": np.where(is_communication[rows], "communication", "other"),
            "kernels": np.zeros(rows.size, np.int64),
            "products": np.zeros(rows.size, np.int64),
            "gradients": np.zeros(rows.size, np.int64),
            "time_ns": np.where(counted, arrays.to_array(events["dur"], 0), self_time)[rows],
        },
        schema_overrides={"kernel_family": pl.String},
    ).with_columns(
        pl.col("kernel_family").cast(FAMILY),
        tf32=pl.lit(False),
        bus=pl.lit(False),
        packed=pl.lit(False),
        basis=pl.lit("host"),
    )


def _make_node_units(trace: Trace) -> pl.DataFrame:
    """Return the counted operators of an execution trace with their costs; their times are unknown."""
    nodes = trace.nodes
    functions = (nodes["scope"].fill_null(0) == 0).to_numpy()
    rows = np.flatnonzero(_select_counted(nodes["name"], functions, rows_of_ids(nodes, nodes["parent"])))
    return compute_node_costs(trace, nodes.select(node="id")[rows]).with_columns(
        replay=pl.lit(-1, dtype=pl.Int64),
        step=pl.lit(None, dtype=pl.Int64),
        kernels=pl.lit(0, dtype=pl.Int64),
        time_ns=pl.lit(None, dtype=pl.Int64),
        tf32=pl.lit(False),
        bus=pl.lit(False),
        basis=pl.lit("none"),
    )
