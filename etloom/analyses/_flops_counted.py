"""The calls of a trace that have a cost: which operator counts, what it cost, and how long the device worked for it.

Of operators inside each other one counts: the outermost that has a formula, and all kernels launched in it or below it
are its own. On a trace with device work only what launched some counts. Where Kineto did not record the shapes, those
of the execution trace are taken, through the links.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import kinds, stacks
from etloom.analyses._activity import device_work, of_rank, require_linked
from etloom.analyses._flops_call import Call, Cost, kineto_call, node_call
from etloom.analyses._flops_registry import entry, kernel_family
from etloom.analyses.recompute import ran_again
from etloom.errors import AnalysisError
from etloom.stacks import row_of
from etloom.trace import Trace

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
_MOST = 2**56
"""More operations or bytes than one call has, so that sums stay within 64 bits."""
_BUS = r"HtoD|DtoH|Pinned|Pageable|PtoP|HostToDevice|DeviceToHost"
_TF32 = r"(?i)tf32|s1688|nvjet_s"
_COSTS = {"flops": pl.Int64, "bytes": pl.Int64, "model_flops": pl.Int64, "dtype": pl.String}
_KEY = ("name", "dims", "types", "strides", "values")


def counted(trace: Trace) -> pl.DataFrame:
    """A row a call, and a row for each other operator that launched work, and each kernel that none is known of.

    id (of the operator, null where unknown), name, family, step, known (whether it has a cost), flops, bytes,
    model_flops (0 where activation checkpointing computed it again), dtype, tf32 (float arithmetic in TF32, by the
    kernels' names), bus (it copied from or to the host, or another device), kernels, time_ns (in which some of its
    device work ran; basis host: its duration, of an operator without a cost its self time), basis, dims, types.
    Communication is no part of it.

    Raises AnalysisError where nothing has shapes.
    """
    require_linked(trace)
    events = trace.events
    parent = row_of(events, events["parent"])
    chosen = _chosen(trace, parent)
    rows = np.flatnonzero(chosen)
    calls = events[rows].select("id", "step", pl.col("name").cast(pl.String))
    calls = calls.with_columns(recomputed=pl.Series(_recomputed(trace, parent)[rows]))
    if device_work(trace).height:
        work = kernels(trace, parent, chosen).filter(pl.col("kind") != "communication")
        units = (
            _by_owner(work)
            .join(calls, left_on="owner", right_on="id", how="left", maintain_order="left")
            .with_columns(id="owner", basis=pl.lit("device"), costed=pl.col("name").is_not_null())
            .with_columns(step=pl.coalesce("step", "kernel_step"))
        )
    else:
        units = _host_units(trace, parent, chosen, calls)
    names = events.select("id", own_name=pl.col("name").cast(pl.String))
    units = units.join(names, on="id", how="left", maintain_order="left").with_columns(
        name=pl.coalesce("name", "own_name")
    )
    units = _with_costs(trace, units)
    if not units["known"].any():
        raise AnalysisError(
            "no operator that did work has recorded shapes",
            where=of_rank(trace),
            remedy="profile with record_shapes=True, or put the execution trace of the run beside it",
        )
    families = {name: found.family for name in units["name"].unique().drop_nulls() if (found := entry(name))}
    by_name = pl.col("name").replace_strict(families, default=None, return_dtype=pl.String)
    return units.with_columns(
        family=pl.when("costed").then(by_name).otherwise("kernel_family"),
        model_flops=pl.when("recomputed").then(0).otherwise("model_flops"),
    ).filter(pl.col("family") != "communication")


def kernels(trace: Trace, parent: Rows | None = None, chosen: Mask | None = None) -> pl.DataFrame:
    """Device work with the call it belongs to: id, kind, name, step, ts, dur, end, operator (that launched it), owner
    (id of the call, else of the operator that launched it, null where unknown), kernel_family, tf32, bus.

    Raises AnalysisError for a trace without device work.
    """
    require_linked(trace)
    work = device_work(trace)
    if not work.height:
        raise AnalysisError(
            "the trace holds no device work",
            where=of_rank(trace),
            remedy="record it with the profiler's CUDA activity",
        )
    launches = trace.launches.select("operator", id="device_event").unique("id", keep="first")
    work = work.select(
        "id", pl.col("kind", "name").cast(pl.String), "step", "ts", "dur", end=pl.col("ts") + pl.col("dur")
    ).join(launches, on="id", how="left", maintain_order="left")
    names = work.select("kind", "name").unique()
    names = names.with_columns(
        kernel_family=kernel_family(pl.col("kind"), pl.col("name")),
        tf32=pl.col("name").str.contains(_TF32),
        bus=pl.col("name").str.contains(_BUS),
    )
    work = work.join(names, on=["kind", "name"], how="left", maintain_order="left")
    if parent is None or chosen is None:
        parent = row_of(trace.events, trace.events["parent"])
        chosen = _chosen(trace, parent)
    around = row_of(trace.events, work["operator"])
    owner = stacks.nearest(parent, chosen, around)
    owner = np.where(owner >= 0, owner, around)
    ids = trace.events["id"].to_numpy()
    known = pl.Series(np.where(owner >= 0, ids[owner], 0), dtype=pl.UInt32)
    return work.with_columns(owner=pl.select(pl.when(pl.Series(owner >= 0)).then(known)).to_series())


def _chosen(trace: Trace, parent: Rows) -> Mask:
    """Which rows are operators that count."""
    events = trace.events
    operators = stacks.among(events["cat"], kinds.OPERATORS) & events["dur"].is_not_null().to_numpy()
    entries = {name: entry(name) for name in events["name"].unique().drop_nulls().cast(pl.String)}
    plain = [name for name, found in entries.items() if found and not found.composite]
    composite = [name for name, found in entries.items() if found and found.composite]
    whole: Mask = operators & stacks.among(events["name"], plain)
    made_of: Mask = operators & stacks.among(events["name"], composite)
    rows = np.flatnonzero(whole)
    whole[rows[stacks.nearest(parent, whole, _above(parent, rows)) >= 0]] = False
    rows = np.flatnonzero(made_of)
    made_of[rows[stacks.nearest(parent, whole, rows) >= 0]] = False
    # A composite operator around one that counts, itself a composite or not, is accounted for by that.
    climbing = _above(parent, np.flatnonzero(whole | made_of))
    around = np.zeros(events.height, dtype=np.bool_)
    while climbing.size:
        found = np.unique(stacks.nearest(parent, made_of & ~around, climbing))
        found = found[found >= 0]
        around[found] = True
        climbing = _above(parent, found)
    return whole | (made_of & ~around)


def _recomputed(trace: Trace, parent: Rows) -> Mask:
    """Which rows lie in an operator that activation checkpointing runs again."""
    events = trace.events
    operators = stacks.among(events["cat"], kinds.OPERATORS) & events["depth"].is_not_null().to_numpy()
    backward = operators & (events["fwd_tid"] > 0).fill_null(False).to_numpy()
    again = np.zeros(events.height, dtype=np.bool_)
    if backward.any():
        again[ran_again(trace, parent, operators, backward)[0]] = True
    inside: Mask = stacks.nearest(parent, again, np.arange(events.height)) >= 0
    return inside


def _above(parent: Rows, rows: Rows) -> Rows:
    above: Rows = parent[rows]
    return above


def _by_owner(work: pl.DataFrame) -> pl.DataFrame:
    """A row an owner, and one a kernel without: owner, kernel_step, kernel_family (of the longest), kernels, time_ns,
    tf32, bus."""
    # Where no operator is known each kernel stands for itself.
    own = pl.when(pl.col("owner").is_null()).then(pl.col("id"))
    work = work.with_columns(own.alias("own")).sort("owner", "own", "ts")
    before = pl.col("end").cum_max().shift(1).over("owner", "own")
    return (
        work.with_columns(
            fresh=(pl.col("end") - pl.max_horizontal("ts", before.fill_null(pl.col("ts")))).clip(0)
        )
        .group_by("owner", "own", maintain_order=True)
        .agg(
            pl.col("step").first().alias("kernel_step"),
            pl.col("kernel_family").sort_by("dur", descending=True, maintain_order=True).first(),
            pl.len().cast(pl.Int64).alias("kernels"),
            pl.col("fresh").sum().alias("time_ns"),
            pl.col("tf32", "bus").any(),
        )
        .drop("own")
    )


def _host_units(trace: Trace, parent: Rows, chosen: Mask, calls: pl.DataFrame) -> pl.DataFrame:
    """As the units of device work, of the host's operators."""
    events = trace.events
    own = stacks.exclusive_time(events, operators_only=True).to_numpy()
    operators = stacks.among(events["cat"], kinds.OPERATORS) & events["dur"].is_not_null().to_numpy()
    inside = stacks.nearest(parent, chosen, np.arange(events.height)) >= 0
    talks = stacks.asked(events["name"], kinds.is_communication)
    rows = np.flatnonzero(operators & (chosen | ~inside))
    time = np.where(chosen, events["dur"].fill_null(0).to_numpy(), own)[rows]
    units = (
        events[rows]
        .select("id", host_step="step")
        .with_columns(
            pl.Series("time_ns", time),
            kernel_family=pl.select(
                pl.when(pl.Series(talks[rows])).then(pl.lit("communication")).otherwise(pl.lit("other"))
            ).to_series(),
            kernels=pl.lit(0, dtype=pl.Int64),
            tf32=pl.lit(False),
            bus=pl.lit(False),
            basis=pl.lit("host"),
        )
    )
    units = units.join(calls, on="id", how="left", maintain_order="left")
    return units.with_columns(costed=pl.col("name").is_not_null(), step=pl.coalesce("step", "host_step"))


def _with_costs(trace: Trace, units: pl.DataFrame) -> pl.DataFrame:
    """units with dims, types, known and the columns of a cost; each distinct call is worked out once."""
    arguments = trace.arguments.select(
        "dims", "types", "strides", id="event", values="concrete_inputs"
    ).unique("id", keep="first")
    arguments = arguments.with_columns(pl.col(pl.Categorical).cast(pl.String))
    units = units.join(arguments, on="id", how="left", maintain_order="left")
    ask = units.filter("costed").select(_KEY).unique()
    costs = [_kineto_cost(row) for row in ask.iter_rows(named=True)]
    units = units.join(
        ask.hstack(_frame(costs)), on=list(_KEY), how="left", nulls_equal=True, maintain_order="left"
    )
    unsaid = units.filter("costed", pl.col("flops").is_null() & pl.col("bytes").is_null())
    said = _node_costs(trace, unsaid.select("id", "name"))
    units = units.join(said, on="id", how="left", maintain_order="left", suffix="_said").with_columns(
        *(pl.coalesce(name, f"{name}_said").alias(name) for name in _COSTS),
        dims=pl.coalesce("dims", "dims_said"),
        types=pl.coalesce("types", "types_said"),
    )
    known = pl.col("costed") & (pl.col("flops").is_not_null() | pl.col("bytes").is_not_null())
    # A name may fit by chance an operator that did not count (inside another): it keeps its time alone.
    return units.with_columns(known=known).with_columns(
        pl.when("known").then(pl.col(name)).alias(name) for name in _COSTS
    )


def _frame(costs: list[Cost | None]) -> pl.DataFrame:
    none = Cost(None, None)
    rows = [
        (cost.flops, cost.bytes, cost.flops if cost.model_flops is None else cost.model_flops, cost.dtype)
        for cost in (cost or none for cost in costs)
    ]
    return pl.DataFrame(rows, schema=_COSTS, orient="row")


def cost_of(call: Call) -> Cost | None:
    """What a call costs; None where it has no formula, lacks what that needs, or states what cannot be."""
    found = entry(call.name)
    if found is None:
        return None
    try:
        cost = found.formula(call)
    except (ValueError, ArithmeticError, LookupError, TypeError):
        return None
    numbers = (cost.flops, cost.bytes, cost.model_flops)
    return cost if all(number is None or 0 <= number < _MOST for number in numbers) else None


def _kineto_cost(row: dict[str, Any]) -> Cost | None:
    if not row["dims"]:
        return None
    try:
        call = kineto_call(row["name"], row["dims"], row["types"], row["strides"], row["values"])
    except (ValueError, TypeError, RecursionError):
        return None
    return cost_of(call)


def _node_costs(trace: Trace, asked: pl.DataFrame) -> pl.DataFrame:
    """id, the columns of a cost, dims, types of the asked calls whose node in the execution trace says them."""
    links = trace.links.select("node", id="event").unique("id", keep="first")
    found = asked.join(links, on="id").join(
        trace.nodes.select(node="id", inputs=pl.col("inputs").cast(pl.String)), on="node"
    )
    tensors = trace.tensors.join(found.select("node"), on="node", how="semi").with_columns(
        pl.col(pl.Categorical).cast(pl.String)
    )
    lists = {key: group.to_dicts() for (key,), group in tensors.group_by("node", maintain_order=True)}
    rows: list[tuple[Any, ...]] = []
    costs: list[Cost | None] = []
    for row in found.iter_rows(named=True):
        mine = sorted(lists.get(row["node"], ()), key=lambda one: (one["io"], one["index"], one["item"] or 0))
        try:
            costs.append(cost_of(node_call(row["name"], mine, row["inputs"])))
        except (ValueError, TypeError, RecursionError):
            costs.append(None)
        plain = [one for one in mine if not one["io"]]
        rows.append((row["id"], *(_listed(plain, name) for name in ("shape", "dtype"))))
    told = pl.DataFrame(rows, schema={"id": pl.UInt32, "dims": pl.String, "types": pl.String}, orient="row")
    return told.hstack(_frame(costs))


def _listed(tensors: list[dict[str, Any]], name: str) -> str:
    """The shapes or types of some tensors as one JSON list."""
    if name == "shape":
        return f"[{', '.join(one[name] or 'null' for one in tensors)}]"
    return json.dumps([one[name] for one in tensors])
