"""The calls of a trace that have a cost: which operator counts, what it cost, and how long the device worked for it.

Of operators inside each other one counts: the outermost that has a formula, and all kernels launched in it or below it
are its own. On a trace with device work only what launched some counts. Where Kineto did not record the shapes, those
of the execution trace are taken, through the links.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.flops.backward_costs import derive_backward_costs
from etloom.analyses.flops.call_costs import add_costs, compute_node_costs
from etloom.analyses.flops.formulas import FAMILIES, find_entry, infer_kernel_family
from etloom.analyses.helpers import require_linked
from etloom.analyses.helpers.launched_work import select_launched_work
from etloom.analyses.recompute import find_recomputed
from etloom.core import arrays, categories
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, select_device_events

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
FAMILY = pl.Enum(FAMILIES)
_BUS = r"HtoD|DtoH|Pinned|Pageable|PtoP|HostToDevice|DeviceToHost"
_SUM_OF_PARTS = r"(?i)split_?k_?reduce|reduce_?split_?k"
"""Kernels that sum the parts of a product that was split along k; they count as gemm and are no product."""
_TF32 = r"(?i)tf32|s1688|nvjet_s"
_OF_INPUT, _OF_WEIGHT = r"(?i)dgrad|igemm_bwd", r"(?i)wgrad|igemm_wrw"
"""Which gradient of a convolution a kernel is part of, as cuDNN, CUTLASS and MIOpen call them."""
_LAYOUT = r"nchwToNhwc|nhwcToNchw"


def count_calls(trace: Trace) -> pl.DataFrame:
    """A row a call, and a row for each other operator that launched work, and each kernel that none is known of.

    row (of the operator in events, -1 where unknown), name, family, step, known (whether it has a cost), flops, bytes,
    model_flops (0 where activation checkpointing computed it again), dtype, tf32 (float arithmetic in TF32, by the
    kernels' names), bus (it copied from or to the host, or another device), kernels, time_ns (in which some of its
    device work ran; basis host: its duration, of an operator without a cost its self time), basis, dims, types.
    Communication is no part of it.

    Of an execution trace alone the operators that count, in no time (basis none). Raises AnalysisError where nothing
    has shapes.
    """
    require_linked(trace)
    events = trace.events
    if not events.height and trace.nodes.height:
        return _checked(trace, _node_units(trace))
    parent = rows_of_ids(events, events["parent"])
    chosen = _chosen(events["name"], _operators(events), parent)
    if select_device_events(trace).height:
        work = assign_kernels(trace, parent, chosen)
        units = _by_owner(work.filter(pl.col("kind") != "communication"))
    else:
        units = _host_units(events, parent, chosen)
    at = units["row"].to_numpy()
    costed = (at >= 0) & chosen[at]
    again = _recomputed(trace, parent)
    units = units.hstack(take_rows(events.select("id", "name", own_step="step"), at)).with_columns(
        pl.Series("costed", costed), pl.Series("recomputed", costed & again[at])
    )
    units = _checked(trace, add_costs(trace, units))
    units = derive_backward_costs(trace, units, parent).drop("products", "gradients")
    return units.with_columns(
        known=pl.col("flops").is_not_null() | pl.col("bytes").is_not_null(),
        family=pl.when("costed").then("family").otherwise("kernel_family"),
        step=pl.when("costed").then("own_step").otherwise(pl.coalesce("own_step", "step")),
        model_flops=pl.when("recomputed").then(0).otherwise("model_flops"),
    ).filter(pl.col("family") != "communication")


def _checked(trace: Trace, units: pl.DataFrame) -> pl.DataFrame:
    """units with known and the family of their operators; AnalysisError where nothing is known."""
    units = units.with_columns(
        lookup_families(units["name"]), known=pl.col("flops").is_not_null() | pl.col("bytes").is_not_null()
    )
    if not units["known"].any():
        raise AnalysisError(
            "no operator that did work has recorded shapes",
            where=describe_rank(trace),
            remedy="profile with record_shapes=True, or put the execution trace of the run beside it",
        )
    return units


def lookup_families(names: pl.Series) -> pl.Series:
    """The family of each operator by its name, null where it has no formula."""
    known = names.unique().to_frame("text")
    told = [found.family if name and (found := find_entry(name)) else None for name in known["text"]]
    known = known.with_columns(pl.Series("family", told, dtype=FAMILY))
    joined = names.to_frame("text").join(
        known, on="text", how="left", maintain_order="left", nulls_equal=True
    )
    return joined["family"]


def assign_kernels(trace: Trace, parent: Rows | None = None, chosen: Mask | None = None) -> pl.DataFrame:
    """Device work with the call it belongs to: id, kind, name, step, ts, dur, end, row (of the call in events, else of
    the operator that launched it, -1 where unknown), kernel_family, tf32, bus, product (whether
    it is one by itself, where its family is gemm), gradient (of a convolution: "input", "weight", "" of a kernel that
    computes and does not say, null of others).

    Raises AnalysisError for a trace without device work.
    """
    work = select_launched_work(trace, "id", "kind", "name", "step", "ts", "dur", "end", "operator")
    names = work.select("kind", "name").unique()
    name = pl.col("name").cast(pl.String)
    names = names.with_columns(
        kernel_family=infer_kernel_family(pl.col("kind").cast(pl.String), name).cast(FAMILY),
        tf32=name.str.contains(_TF32),
        product=~name.str.contains(_SUM_OF_PARTS),
        bus=name.str.contains(_BUS),
        gradient=pl.when(name.str.contains(_OF_INPUT))
        .then(pl.lit("input"))
        .when(name.str.contains(_OF_WEIGHT))
        .then(pl.lit("weight"))
        .when(~name.str.contains(f"{_SUM_OF_PARTS}|{_LAYOUT}"))
        .then(pl.lit("")),
    ).with_columns(pl.when(pl.col("kernel_family").is_in(["gemm", "convolution"])).then("gradient"))
    work = work.join(names, on=["kind", "name"], how="left", maintain_order="left")
    if parent is None or chosen is None:
        parent = rows_of_ids(trace.events, trace.events["parent"])
        chosen = _chosen(trace.events["name"], _operators(trace.events), parent)
    around = rows_of_ids(trace.events, work["operator"])
    owner = arrays.find_nearest_ancestor(parent, chosen, around)
    return work.drop("operator").with_columns(pl.Series("row", np.where(owner >= 0, owner, around)))


def _operators(events: pl.DataFrame) -> Mask:
    """Which rows of events are operators that have a duration."""
    found: Mask = (
        arrays.is_in(events["cat"], categories.OPERATOR_CATEGORIES) & events["dur"].is_not_null().to_numpy()
    )
    return found


def _chosen(names: pl.Series, operators: Mask, parent: Rows) -> Mask:
    """Which operators count, by the names of all rows and the row around each."""
    entries = {name: find_entry(name) for name in names.unique().drop_nulls().cast(pl.String)}
    plain = [name for name, found in entries.items() if found and not found.composite]
    composite = [name for name, found in entries.items() if found and found.composite]
    whole: Mask = operators & arrays.is_in(names, plain)
    made_of: Mask = operators & arrays.is_in(names, composite)
    rows = np.flatnonzero(whole)
    whole[rows[arrays.find_nearest_ancestor(parent, whole, _above(parent, rows)) >= 0]] = False
    rows = np.flatnonzero(made_of)
    made_of[rows[arrays.find_nearest_ancestor(parent, whole, rows) >= 0]] = False
    # A composite operator around one that counts, itself a composite or not, is accounted for by that.
    climbing = _above(parent, np.flatnonzero(whole | made_of))
    around = np.zeros(len(names), dtype=np.bool_)
    while climbing.size:
        found = np.unique(arrays.find_nearest_ancestor(parent, made_of & ~around, climbing))
        found = found[found >= 0]
        around[found] = True
        climbing = _above(parent, found)
    return whole | (made_of & ~around)


def _recomputed(trace: Trace, parent: Rows) -> Mask:
    """Which rows lie in an operator that activation checkpointing runs again."""
    events = trace.events
    operators = (
        arrays.is_in(events["cat"], categories.OPERATOR_CATEGORIES) & events["depth"].is_not_null().to_numpy()
    )
    backward = operators & (events["fwd_tid"] > 0).fill_null(False).to_numpy()
    again = np.zeros(events.height, dtype=np.bool_)
    if not backward.any():
        return again
    again[find_recomputed(trace, parent, operators, backward)[0]] = True
    if not again.any():
        return again
    inside: Mask = arrays.find_nearest_ancestor(parent, again, np.arange(events.height)) >= 0
    return inside


def _above(parent: Rows, rows: Rows) -> Rows:
    above: Rows = parent[rows]
    return above


def _by_owner(work: pl.DataFrame) -> pl.DataFrame:
    """A row a call, and one a kernel without, with row, step, kernel_family (of the longest), kernels, time_ns, tf32,
    bus, products (how many of its kernels are matrix products), gradients (of a convolution, 0 where the names of its
    kernels do not tell how many), basis."""
    # Where no operator is known each kernel stands for itself.
    own = pl.when(pl.col("row") < 0).then(pl.col("id").cast(pl.Int64)).otherwise(-1)
    work = work.with_columns(own=own).sort("row", "own", "ts")
    row, one = work["row"].to_numpy(), work["own"].to_numpy()
    start, end = work["ts"].to_numpy(), work["end"].to_numpy()
    begins = np.flatnonzero(np.append(True, (row[1:] != row[:-1]) | (one[1:] != one[:-1]))[: row.size])
    of = np.repeat(np.arange(begins.size), np.diff(np.append(begins, row.size)))
    # A union of intervals: what begins before the latest end of its call so far adds only what lies behind that. By
    # rank, since ranks of one call after another stay small where times would not.
    order = np.argsort(end, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    latest = end[order][np.maximum.accumulate(rank + of * order.size) - of * order.size]
    before = np.append(0, latest[:-1])
    before[begins] = start[begins]
    fresh = np.clip(end - np.maximum(start, before), 0, None)
    sides = pl.col("gradient").replace("", None).drop_nulls().n_unique()
    says = (pl.col("gradient") != "").all()
    return (
        work.with_columns(pl.Series("of", of), pl.Series("fresh", fresh))
        .group_by("of", maintain_order=True)
        .agg(
            pl.col("row", "step").first(),
            pl.col("kernel_family").get(pl.col("dur").arg_max()),
            pl.len().cast(pl.Int64).alias("kernels"),
            pl.col("fresh").sum().alias("time_ns"),
            pl.col("tf32", "bus").any(),
            (pl.col("product") & (pl.col("kernel_family") == "gemm")).sum().cast(pl.Int64).alias("products"),
            # What does not say its gradient may be of either: then only both together are known to be two.
            pl.when((sides == 2) | says).then(sides.cast(pl.Int64)).otherwise(0).alias("gradients"),
        )
        .with_columns(basis=pl.lit("device"))
    )


def _host_units(events: pl.DataFrame, parent: Rows, chosen: Mask) -> pl.DataFrame:
    """As the units of device work, of the host's operators."""
    own = arrays.compute_exclusive_time(events, operators_only=True).to_numpy()
    operators = _operators(events)
    inside = arrays.find_nearest_ancestor(parent, chosen, np.arange(events.height)) >= 0
    talks = arrays.match_text(events["name"], categories.is_communication)
    rows = np.flatnonzero(operators & (chosen | ~inside))
    return pl.DataFrame(
        {
            "row": rows,
            "step": events["step"][rows],
            "kernel_family": np.where(talks[rows], "communication", "other"),
            "kernels": np.zeros(rows.size, np.int64),
            "products": np.zeros(rows.size, np.int64),
            "gradients": np.zeros(rows.size, np.int64),
            "time_ns": np.where(chosen, events["dur"].fill_null(0).to_numpy(), own)[rows],
        },
        schema_overrides={"kernel_family": pl.String},
    ).with_columns(
        pl.col("kernel_family").cast(FAMILY), tf32=pl.lit(False), bus=pl.lit(False), basis=pl.lit("host")
    )


def _node_units(trace: Trace) -> pl.DataFrame:
    """The operators of an execution trace that count, with their costs; their times are not known."""
    nodes = trace.nodes
    functions = (nodes["scope"].fill_null(0) == 0).to_numpy()
    rows = np.flatnonzero(_chosen(nodes["name"], functions, rows_of_ids(nodes, nodes["parent"])))
    return compute_node_costs(trace, nodes.select(node="id")[rows]).with_columns(
        step=pl.lit(None, dtype=pl.Int64),
        kernels=pl.lit(0, dtype=pl.Int64),
        time_ns=pl.lit(None, dtype=pl.Int64),
        tf32=pl.lit(False),
        bus=pl.lit(False),
        basis=pl.lit("none"),
    )
