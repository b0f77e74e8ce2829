"""Infer the axis of parallelism (dp, tp, pp, ...) of each process group from its name, else from its collectives.

A name decides (`core.parallel_axes`). A group without a telling name is recognized by what its ranks do with it:

- only sends and receives: pipeline parallelism; context parallelism if the rank sends to one rank and receives from
  another one, a ring of more than two ranks;
- all-to-all, and at most small other collectives: expert parallelism;
- reductions and gathers, in a run with matrix products but no backward pass: tensor parallelism;
- reductions and gathers, in a run with a backward pass: data parallelism for the group of all ranks. If there are two
  kinds of groups, groups of consecutive ranks are tensor parallel, and groups of ranks with a stride data parallel.

Any other group has no axis. The group of all ranks keeps the label "world" if its use suggests an axis that another
group has by name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.core.parallel_axes import WORLD, parse_axis
from etloom.core.trace import Trace

SCHEMA = {"pg_name": pl.String, "axis": pl.String, "axis_from": pl.String}
"""axis_from: name | use."""

_P2P = frozenset({"send", "recv", "send_recv", "message"})
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "all_gather"})
_SMALL_SHARE = 0.1
"""All-to-all dominates if the other collectives of the group move at most this share of its bytes."""


def add_group_axes(trace: Trace) -> Trace:
    """Add to the ``groups`` table the axis of parallelism (dp, tp, pp, ...) of each group and how it was inferred."""
    groups = trace.groups
    if not groups.height:
        return trace
    axes = infer_group_axes(trace).with_columns(pl.col("pg_name").cast(groups.schema["pg_name"]))
    joined = groups.drop("axis", "axis_from", strict=False).join(
        axes, on="pg_name", how="left", maintain_order="left"
    )
    return trace.replace(None, groups=joined)


def infer_group_axes(trace: Trace) -> pl.DataFrame:
    """Return the axis of parallelism of each process group of the trace (`SCHEMA`); null if unknown.

    The row of a null name holds the axis of calls that state no group, if there is only one group.
    """
    uses = _collect_uses(trace)
    for use in uses.values():
        stated = parse_axis(use["desc"]) or parse_axis(use["name"])
        use["axis"], use["axis_from"] = stated, "name" if stated else None
    named = {axis for use in uses.values() for axis in (use["axis"] or "").split("+")}
    unnamed = [use for use in uses.values() if use["axis"] in (None, WORLD) and use["collectives"]]
    for use, axis in list(_infer_from_use(unnamed, trace)):
        if use["axis"] is None or axis not in named:
            use["axis"], use["axis_from"] = axis, "use"
    rows = [[name, use["axis"], use["axis_from"]] for name, use in uses.items()]
    if len(rows) == 1:
        rows.append([None, *rows[0][1:]])
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _collect_uses(trace: Trace) -> dict[str, dict[str, Any]]:
    """Collect by process-group name: description, ranks, size, bytes per collective, and send and receive peers.

    Calls that state no group belong to the only declared group, if there is one.
    """
    uses: dict[str, dict[str, Any]] = {}

    def use_of(name: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"name": name, "desc": None, "ranks": (), "size": None, "collectives": {}}
        return uses.setdefault(name, empty | {"sent_to": set(), "received_from": set()})

    declared = trace.groups.select(pl.col("pg_name", "pg_desc", "ranks").cast(pl.String), "size")
    for name, desc, ranks, size in declared.filter(pl.col("pg_name").is_not_null()).iter_rows():
        use_of(name).update(desc=desc, ranks=_parse_ranks(ranks), size=size)
    only = next(iter(uses)) if len(uses) == 1 else None
    texts = pl.col("pg_name", "pg_desc", "ranks", "collective").cast(pl.String)
    calls = (
        trace.comms.select(texts, "group_size", "peer", "bytes")
        .group_by("pg_name", "pg_desc", "ranks", "collective", "group_size", "peer")
        .agg(pl.col("bytes").sum())
    )
    for name, desc, ranks, collective, size, peer, total in calls.sort(calls.columns).iter_rows():
        name = name or only
        if name is None or collective in (None, "wait", "barrier"):
            continue
        use = use_of(name)
        use["desc"], use["size"] = use["desc"] or desc, use["size"] or size
        use["ranks"] = use["ranks"] or _parse_ranks(ranks)
        use["collectives"][collective] = use["collectives"].get(collective, 0) + (total or 0)
        if peer is not None and collective in ("send", "recv"):
            use["sent_to" if collective == "send" else "received_from"].add(peer)
    return uses


def _parse_ranks(text: str | None) -> tuple[int, ...]:
    return tuple(json.loads(text)) if text else ()


def _infer_from_use(uses: list[dict[str, Any]], trace: Trace) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (facts of a process group, axis) for each group whose collectives identify its axis of parallelism."""
    world = trace.meta.get("world_size")
    reducing = []
    for use in uses:
        collectives, size = use["collectives"], use["size"] or len(use["ranks"])
        if set(collectives) <= _P2P:
            yield use, "cp" if _is_ring(use, size) else "pp"
        elif moved := collectives.get("all_to_all"):
            others = sum(total for name, total in collectives.items() if name != "all_to_all")
            if others <= _SMALL_SHARE * moved:
                yield use, "ep"
        elif _REDUCTIONS & set(collectives) and size != 1:
            reducing.append((use, size))
    if not reducing:
        return
    names = _collect_names(trace)
    if not names.str.contains(r"autograd::engine|^Optimizer\.|_backward").any():
        if names.str.contains(r"(?i)mm$|matmul|linear|gemm").any():
            yield from ((use, "tp") for use, _ in reducing)
        return
    strides = {_stride(use["ranks"]) for use, _ in reducing}
    for use, size in reducing:
        stride = _stride(use["ranks"])
        if len(reducing) == 1 and size is not None and size == world:
            yield use, "dp"
        elif len(reducing) > 1 and stride is not None and size != world:
            if stride == 1 and any(other is not None and other > 1 for other in strides):
                yield use, "tp"
            elif stride > 1 and 1 in strides:
                yield use, "dp"


def _is_ring(use: dict[str, Any], size: int | None) -> bool:
    """Return whether the rank sends to one rank and receives from another, in a group of more than two ranks."""
    sent_to, received_from = use["sent_to"], use["received_from"]
    return len(sent_to) == 1 and len(received_from) == 1 and sent_to != received_from and (size or 0) > 2


def _stride(ranks: tuple[int, ...]) -> int | None:
    """Return the constant difference between consecutive ranks of a group; None if it is not constant."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else None


def _collect_names(trace: Trace) -> pl.Series:
    """Return the distinct names of all operators and events of the trace."""
    columns = [trace.nodes["name"], trace.events["name"]]
    return pl.concat([column.unique().drop_nulls().cast(pl.String) for column in columns]).unique()
