"""Builds the program of a computation replay from a trace: its operators, their order, and the flow of tensors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
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
    OperatorSelection,
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
    """A recorded operator that the replay does not run, with the reason and its recorded duration (ns)."""

    name: str
    reason: str
    recorded_ns: int | None

    @property
    def is_communication(self) -> bool:
        return self.reason == COMMUNICATION_REASON


@dataclass(frozen=True)
class Program:
    """The operator calls of a computation replay in order, the omitted operators, and the tensor storages in use.

    Attributes:
        bytes: Storage -> size.
        external: Storages that no step creates.
        constant: External storages that no step writes.
        unfilled: Storages that a step creates but nothing fills before they are read.
    """

    steps: list[ProgramStep]
    omitted: list[OmittedOperator]
    bytes: dict[int, int] = field(default_factory=dict)
    external: frozenset[int] = frozenset()
    constant: frozenset[int] = frozenset()
    unfilled: frozenset[int] = frozenset()


def build_program(
    trace: Trace,
    namespaces: frozenset[str] = frozenset({"aten"}),
    step: int | None = None,
    subgraph: str | None = None,
) -> Program:
    """Build the program (operator calls and storages) that replays a linked trace, or only a step or subgraph of it.

    Raises:
        EtloomError: Nothing that can be replayed was recorded.
    """
    nodes = select_nodes(trace, step, subgraph).with_columns(pl.col(pl.Categorical).cast(pl.String))
    timed = trace.links.join(trace.events.select(event="id", dur="dur"), on="event")
    durations: dict[int, int] = dict(timed.select("node", "dur").iter_rows())
    selection = select_operators(nodes, namespaces)
    omitted = _omitted_operators(selection, durations)
    if not selection.run:
        reasons = Counter(f": {operator.reason}" for operator in omitted).most_common(1)
        raise EtloomError(
            f"no recorded operator can be replayed{reasons[0][0] if reasons else ''}",
            remedy="etloom info shows what was recorded",
        )
    refused = ((node, None) for node, _ in selection.omitted)
    ordered = sorted([*selection.run, *refused], key=lambda pair: pair[0]["id"])
    tensors = _tensors_by_node(trace, [node["id"] for node, _ in ordered])
    inner_results = _inner_results(trace, selection.top_nodes)
    steps: list[ProgramStep] = []
    storages = StorageVersions()
    for node, operator in ordered:
        rows = tensors.get(node["id"], [])
        hidden = set(inner_results.get(node["id"], ()))
        if operator is None:
            storages.forget(hidden - {row["storage_id"] for row in rows if row["io"] == INPUT})
            storages.forget_results(rows)
            continue
        try:
            program_step = _make_step(node, operator, rows, hidden, storages)
        except ValueError as error:
            omitted.append(OmittedOperator(node["name"], str(error), durations.get(node["id"])))
            storages.forget_results(rows)
            continue
        program_step.recorded_ns = durations.get(node["id"])
        steps.append(program_step)
    created, filled = mark_freed_storages(steps)
    external = frozenset(storages.bytes.keys() - created)
    return Program(steps, omitted, storages.bytes, external, external - filled, find_unfilled_storages(steps))


def _omitted_operators(selection: OperatorSelection, durations: Mapping[int, int]) -> list[OmittedOperator]:
    omitted = [
        OmittedOperator(node["name"], reason, durations.get(node["id"])) for node, reason in selection.omitted
    ]
    for node, parts in selection.compiled:
        duration = durations.get(node["id"])
        if duration is not None:
            duration = max(0, duration - sum(durations.get(part, 0) for part in parts))
        omitted.append(OmittedOperator(node["name"], COMPILED_REASON, duration))
    return omitted


def _tensors_by_node(trace: Trace, nodes: list[int]) -> dict[int, list[dict[str, Any]]]:
    selected = pl.DataFrame({"node": nodes}, schema={"node": pl.UInt32})
    rows = trace.tensors.join(selected, on="node", how="semi").with_columns(
        pl.col(pl.Categorical).cast(pl.String)
    )
    tensors: dict[int, list[dict[str, Any]]] = {}
    for row in rows.iter_rows(named=True):
        tensors.setdefault(row["node"], []).append(row)
    return tensors


def _inner_results(trace: Trace, top_nodes: Mapping[int, int]) -> dict[int, list[int]]:
    """Return top-level node -> recorded storage ids of the tensors that its descendants returned."""
    inner = pl.DataFrame(
        {"node": list(top_nodes), "top": list(top_nodes.values())},
        schema={"node": pl.UInt32, "top": pl.Int64},
    )
    results = trace.tensors.filter(pl.col("io") == OUTPUT).join(inner, on="node")
    return dict(results.group_by("top").agg("storage_id").iter_rows())


def _make_step(
    node: Node, operator: Operator, rows: list[dict[str, Any]], hidden: set[int], storages: StorageVersions
) -> ProgramStep:
    """Convert a node and its recorded tensors to an operator call of the program.

    Args:
        rows: The node's rows of the table tensors.
        hidden: Ids of storages that inner operators returned.

    Raises:
        ValueError: With the reason why the recorded data are not sufficient.
    """
    try:
        values = json.loads(node["inputs"] or "[]")
    except RecursionError:
        raise ValueError("the recorded inputs of the operator are nested too deeply") from None
    if not isinstance(values, list):
        raise ValueError("the inputs of the operator were not recorded as a list")
    if len(values) > len(operator.arguments):
        raise ValueError("more inputs were recorded than the operator has arguments")
    input_rows = [row for row in rows if row["io"] == INPUT]
    inputs: dict[int, TensorView] = {}
    for place, row in enumerate(input_rows):
        if _is_null(row):
            continue
        inputs[place] = view = storages.view(row, new=False)
        index, item = row["index"], row["item"]
        if not 0 <= index < len(values):
            raise ValueError("a tensor was recorded that is not among the inputs of the operator")
        values[index] = view if item is None else _replace_item(values[index], item, view)
    input_ids = {row["storage_id"] for row in input_rows if not _is_null(row)}
    storages.forget(hidden - input_ids)
    output_rows = [row for row in rows if row["io"] == OUTPUT and not _is_null(row)]
    results = [storages.view(row, row["storage_id"] not in input_ids) for row in output_rows]
    ranges = _recorded_ranges(node["attrs"], inputs)
    saved_under = (f"nid_{node['et_id']}", f"rf_{node['rf_id']}")
    return ProgramStep(
        node["id"], node["name"], operator, values, results, inputs, saved_under, ranges=ranges
    )


def _is_null(row: dict[str, Any]) -> bool:
    """Return whether a row of the table tensors describes an undefined tensor, which has no storage."""
    return (row["dtype"] or "").startswith("nullptr")


def _recorded_ranges(attrs: str | None, inputs: dict[int, TensorView]) -> list[tuple[TensorView, int, int]]:
    """Return (tensor, minimum, maximum) for each integer input of an operator whose value range was recorded."""
    try:
        ranges = json.loads(json.loads(attrs or "{}").get("tensor_range") or "{}")
        pairs = [(int(index), *map(int, pair)) for index, pair in ranges.items() if len(pair) == 2]
    except (ValueError, TypeError, AttributeError):
        return []
    return [(inputs[index], low, high) for index, low, high in pairs if index in inputs and low <= high]


def _replace_item(values: Any, item: int, view: TensorView) -> list[Any]:
    """Return a copy of a list of argument values in which tensor number ``item`` is replaced by ``view``.

    An undefined tensor is not counted as an item. Operators of aten have no nested lists of tensors.
    """
    places = [
        index for index, value in enumerate(values) if value is None or isinstance(value, TensorView)
    ] if values else []  # fmt: skip
    if not 0 <= item < len(places):
        raise ValueError("an input that is a list of tensors was not recorded as a list")
    return [view if index == places[item] else value for index, value in enumerate(values)]
