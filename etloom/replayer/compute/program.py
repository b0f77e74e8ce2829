"""From a recorded trace to the operators that will run: which, in what order, and whose results they take."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Trace
from etloom.replayer.compute.node_selection import select_nodes
from etloom.replayer.compute.operator_selection import (
    COMMUNICATION_REASON,
    COMPILED_REASON,
    Node,
    select_operators,
)
from etloom.replayer.compute.operators import Operator
from etloom.replayer.compute.program_steps import ProgramStep, TensorView
from etloom.replayer.compute.storages import (
    INPUT,
    OUTPUT,
    StorageVersions,
    find_unfilled_storages,
    mark_freed_storages,
)


@dataclass(frozen=True)
class OmittedOperator:
    """A recorded operator that is not run."""

    name: str
    reason: str
    recorded_ns: int | None

    @property
    def is_communication(self) -> bool:
        return self.reason == COMMUNICATION_REASON


@dataclass(frozen=True)
class Program:
    """bytes: of each storage. external: storages that no step gives. constant: of these, what no step gives back.
    unfilled: storages that a step gives, but does not fill, as no later one does before they are read."""

    steps: list[ProgramStep]
    left_out: list[OmittedOperator]
    bytes: dict[int, int] = field(default_factory=dict)
    external: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()
    unfilled_storages: frozenset[int] = frozenset()


def build_program(
    trace: Trace,
    namespaces: frozenset[str] = frozenset({"aten"}),
    step: int | None = None,
) -> Program:
    """The program of a linked trace, or of its step N. Raises EtloomError where nothing was recorded to replay."""
    asked = select_nodes(trace, step).with_columns(pl.col(pl.Categorical).cast(pl.String))
    timed = trace.links.join(trace.events.select(event="id", dur="dur"), on="event")
    spent: dict[int, int] = dict(timed.select("node", "dur").iter_rows())
    chosen = select_operators(asked, namespaces)
    left_out = [
        OmittedOperator(node["name"], reason, spent.get(node["id"])) for node, reason in chosen.left_out
    ]
    for node, parts in chosen.compiled:
        whole = spent.get(node["id"])
        alone = None if whole is None else max(0, whole - sum(spent.get(part, 0) for part in parts))
        left_out.append(OmittedOperator(node["name"], COMPILED_REASON, alone))
    if not chosen.run:
        why = Counter(f": {one.reason}" for one in left_out).most_common(1)
        raise EtloomError(
            f"no recorded operator can be replayed{why[0][0] if why else ''}",
            remedy="etloom info shows what there is",
        )
    refused = ((node, None) for node, _ in chosen.left_out)
    found = sorted([*chosen.run, *refused], key=lambda one: one[0]["id"])
    wanted = pl.DataFrame({"node": [node["id"] for node, _ in found]}, schema={"node": pl.UInt32})
    tensors: dict[int, list[dict[str, Any]]] = {}
    rows = trace.tensors.join(wanted, on="node", how="semi").with_columns(
        pl.col(pl.Categorical).cast(pl.String)
    )
    for row in rows.iter_rows(named=True):
        tensors.setdefault(row["node"], []).append(row)
    pieces = pl.DataFrame(
        {"node": list(chosen.inside), "top": list(chosen.inside.values())},
        schema={"node": pl.UInt32, "top": pl.Int64},
    )
    inner = trace.tensors.filter(pl.col("io") == OUTPUT).join(pieces, on="node")
    within: dict[int, list[int]] = dict(inner.group_by("top").agg("storage_id").iter_rows())
    steps: list[ProgramStep] = []
    storages = StorageVersions()
    for node, operator in found:
        own = tensors.get(node["id"], [])
        hidden = set(within.get(node["id"], ()))
        if operator is None:
            storages.forget(hidden - {row["storage_id"] for row in own if row["io"] == INPUT})
            storages.replaced(own)
            continue
        try:
            one = _make_step(node, operator, own, hidden, storages)
        except ValueError as error:
            left_out.append(OmittedOperator(node["name"], str(error), spent.get(node["id"])))
            storages.replaced(own)
            continue
        one.recorded_ns = spent.get(node["id"])
        steps.append(one)
    made, given = mark_freed_storages(steps)
    external = frozenset(storages.bytes.keys() - made)
    return Program(steps, left_out, storages.bytes, external, external - given, find_unfilled_storages(steps))


def _make_step(
    node: Node, operator: Operator, rows: list[dict[str, Any]], within: set[int], storages: StorageVersions
) -> ProgramStep:
    """within: ids of storages that parts of the operator gave. Raises ValueError with the reason where what was
    recorded is not enough."""
    values = json.loads(node["inputs"] or "[]")
    if not isinstance(values, list):
        raise ValueError("its inputs were not recorded as a list")
    if len(values) > len(operator.arguments):
        raise ValueError("more inputs were recorded than the operator has")
    taken = [row for row in rows if row["io"] == INPUT]
    inputs: dict[int, TensorView] = {}
    for place, row in enumerate(taken):
        if _is_null(row):
            continue
        inputs[place] = view = storages.view(row, new=False)
        at, item = row["index"], row["item"]
        values[at] = view if item is None else _replace_item(values[at], item, view)
    own = {row["storage_id"] for row in taken if not _is_null(row)}
    storages.forget(within - own)
    given = [row for row in rows if row["io"] == OUTPUT and not _is_null(row)]
    results = [storages.view(row, row["storage_id"] not in own) for row in given]
    ranges = _recorded_ranges(node["attrs"], inputs)
    return ProgramStep(
        node["id"], node["name"], operator, values, results, inputs, node["et_id"], ranges=ranges
    )


def _is_null(row: dict[str, Any]) -> bool:
    """Whether a tensor was recorded that is none: such have a place, but no storage."""
    return (row["dtype"] or "").startswith("nullptr")


def _recorded_ranges(attrs: str | None, inputs: dict[int, TensorView]) -> list[tuple[TensorView, int, int]]:
    """The recorded least and most of integer inputs, by their place among the tensors."""
    try:
        told = json.loads(json.loads(attrs or "{}").get("tensor_range") or "{}")
        pairs = [(int(at), *map(int, pair)) for at, pair in told.items() if len(pair) == 2]
    except (ValueError, TypeError, AttributeError):
        return []
    return [(inputs[at], low, high) for at, low, high in pairs if at in inputs and low <= high]


def _replace_item(values: Any, item: int, view: TensorView) -> list[Any]:
    """The list with its item-th tensor in place, as None among tensors is no item. Lists in lists are beyond what
    operators of aten take."""
    places = (
        [at for at, one in enumerate(values) if one is None or isinstance(one, TensorView)] if values else []
    )
    if not 0 <= item < len(places):
        raise ValueError("a list of tensors was not recorded as one")
    return [view if at == places[item] else one for at, one in enumerate(values)]
