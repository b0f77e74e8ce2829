"""Builds the program of a computation replay from a trace: its operators, their order, and the flow of tensors."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Trace
from etloom.replayer.compute.node_selection import select_nodes
from etloom.replayer.compute.operators import Operator, resolve_operator
from etloom.replayer.compute.program_steps import DTYPES, ProgramStep, TensorView, tensor_views
from etloom.replayer.recorded_calls import RAISED_REASON, raised_exception


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
            program_step = make_step(node, operator, rows, hidden, storages)
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


def make_step(
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


# Tracks recorded storages: distinguishes reuses of an id, and determines which steps create, fill and last use each.
#
# Ids of storages are addresses, which are reused: a storage that an operator returns without having read it is a new
# version of its id. It is freed after its last reader.

INPUT, OUTPUT = 0, 1  # values of the column io of the table tensors
_MAX_BYTES = 1 << 50
_EMPTY_OPERATOR = re.compile(r"aten::(new_)?empty(_like|_strided|_permuted)?")


class StorageVersions:
    """Numbers recorded storages: a storage id that is reused for new memory gets a new number (version).

    Attributes:
        bytes: Storage version -> required size.
    """

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self._current: dict[int, int] = {}

    def view(self, row: dict[str, Any], new: bool) -> TensorView:
        """Convert a row of the table `tensors` to a `TensorView` on the current version of its storage.

        Args:
            new: It does not share its storage with an earlier tensor of the same storage id.

        Raises:
            ValueError: It cannot be replayed; the message is the reason.
        """
        if row["dtype"] not in DTYPES:
            raise ValueError(f"unknown dtype {row['dtype']}")
        shape, stride = _parse_sizes(row["shape"]), _parse_sizes(row["stride"])
        has_strides = len(stride) == len(shape)
        if not has_strides:  # not recorded before schema 1.1.1
            stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        if min((0, row["offset"] or 0, *shape, *stride)) < 0:
            raise ValueError("a negative size of a tensor was recorded")
        storage_id = row["storage_id"]
        if new or storage_id not in self._current:
            self._current[storage_id] = len(self.bytes)
            self.bytes[len(self.bytes)] = 0
        storage = self._current[storage_id]
        view = TensorView(
            storage,
            row["dtype"],
            row["offset"] or 0,
            shape,
            stride,
            row["device"] == "cpu",
            None if has_strides else row["tensor_id"],
        )
        if view.bytes > _MAX_BYTES:
            raise ValueError("a recorded tensor is larger than any memory")
        self.bytes[storage] = max(self.bytes[storage], view.bytes)
        return view

    def forget(self, storage_ids: set[int]) -> None:
        """Forget the versions of storage ids whose memory was reused, so that later reads do not get old data."""
        for storage_id in storage_ids:
            self._current.pop(storage_id, None)

    def forget_results(self, rows: list[dict[str, Any]]) -> None:
        """Forget the storage ids of an omitted operator's results, so that later reads do not get old data."""
        read = {row["storage_id"] for row in rows if row["io"] == INPUT}
        self.forget({row["storage_id"] for row in rows if row["io"] == OUTPUT} - read)


def _parse_sizes(text: str | None) -> tuple[int, ...]:
    sizes = json.loads(text or "[]")
    if not isinstance(sizes, list) or any(type(size) is not int for size in sizes):
        raise ValueError("the recorded sizes of a tensor are not a list of integers")
    return tuple(sizes)


def mark_freed_storages(steps: list[ProgramStep]) -> tuple[set[int], set[int]]:
    """Set `ProgramStep.frees` of each step: the storages created by the program whose last use is that step.

    Returns:
        The storages that steps create, and those that steps write or return.
    """
    last_use: dict[int, int] = {}
    created: set[int] = set()
    filled: set[int] = set()
    for index, step in enumerate(steps):
        read = {view.storage for view in tensor_views(step.values)}
        results = {view.storage for view in step.results}
        created |= results - read - last_use.keys()
        filled |= results | step.written()
        last_use |= dict.fromkeys(read | results, index)
    freed: dict[int, list[int]] = {}
    for storage in created:
        freed.setdefault(last_use[storage], []).append(storage)
    for index, storages in freed.items():
        steps[index].frees = tuple(storages)
    return created, filled


def find_unfilled_storages(steps: list[ProgramStep]) -> frozenset[int]:
    """Return the storages that a step reads although no step wrote to them after ``aten::empty`` created them.

    They were filled by code that was not recorded, such as Python in ``torch.tensor([1, 2])``, or by operators that are
    not replayed.
    """
    empty: set[int] = set()
    unfilled: set[int] = set()
    for step in steps:
        results = {view.storage for view in step.results}
        read = {view.storage for view in tensor_views(step.values)}
        written = step.written()
        unfilled |= (read - written - results) & empty
        empty -= written | unfilled
        if _EMPTY_OPERATOR.fullmatch(step.operator.name):
            empty |= results - read
    return frozenset(unfilled)


# Selects the nodes of an execution trace to run: the topmost operators that may run, which call their children.

Node = dict[str, Any]
COMMUNICATION_REASON = "communication: etloom replay comms"
COMPILED_REASON = (
    "its kernels were not recorded (those in C++ never are, those of Triton only with record_shapes); "
    "use TORCH_COMPILE_DISABLE=1"
)
_COMPILED_PREFIX = "## Call CompiledFxGraph"
_COMMUNICATION_PREFIXES = (
    "record_param_comms", "c10d::", "c10d_functional::", "_c10d_functional::", "nccl:", "gloo:",
)  # fmt: skip
_COLUMNS = ("id", "et_id", "rf_id", "name", "parent", "op_schema", "kernel_backend", "inputs", "attrs")


@dataclass
class OperatorSelection:
    """The execution-trace nodes that a replay runs, and the nodes that it cannot run, with reasons.

    Attributes:
        run: The nodes to run, with their operators.
        omitted: Nodes that cannot run, neither themselves nor parts of them, with the reason.
        compiled: Compiled code without recorded operators, with the ids of its recorded nodes.
        top_nodes: Node -> the node of the above that it is part of.
    """

    run: list[tuple[Node, Operator]] = field(default_factory=list)
    omitted: list[tuple[Node, str]] = field(default_factory=list)
    compiled: list[tuple[Node, list[int]]] = field(default_factory=list)
    top_nodes: dict[int, int] = field(default_factory=dict)


def select_operators(nodes: pl.DataFrame, namespaces: frozenset[str]) -> OperatorSelection:
    """Select the nodes that a replay runs: the topmost operators that it supports in the allowed namespaces.

    Args:
        nodes: The table nodes, with complete subtrees.
        namespaces: Namespaces of the operators that may run.
    """
    selector = _Selector(namespaces)
    # Of a duplicate id the first counts: otherwise the chain of parents might not end.
    for node in nodes.select(_COLUMNS).unique("id", keep="first").sort("id").iter_rows(named=True):
        selector.add(node)
    return selector.finish()


@dataclass
class _CompiledGraph:
    """A call of code that torch.compile generated; ``parts``: node ids of its recorded operators and kernels."""

    node: Node
    parts: list[int] = field(default_factory=list)
    has_kernels: bool = False


class _Selector:
    """Decides for each node, in the order of ids (parents before children), whether the replay runs or omits it."""

    def __init__(self, namespaces: frozenset[str]) -> None:
        self._namespaces = namespaces
        self._selection = OperatorSelection()
        self._refused: dict[int, tuple[Node, str]] = {}
        self._tops: set[int] = set()  # nodes that are run or omitted with all their children
        self._refused_around: dict[int, int] = {}  # node -> innermost refused node around it
        self._graphs: dict[int, _CompiledGraph] = {}  # node -> compiled graph that it is part of

    def add(self, node: Node) -> None:
        index, parent = node["id"], node["parent"]
        top_nodes = self._selection.top_nodes
        if parent in self._tops or parent in top_nodes:
            top_nodes[index] = parent if parent in self._tops else top_nodes[parent]
            return
        outer = parent if parent in self._refused else self._refused_around.get(parent)
        if outer is not None:
            self._refused_around[index] = outer
        graph = _enclosing_graph(node, self._graphs.get(parent))
        if graph is not None:
            self._graphs[index] = graph
        resolved = _resolve_node(node, self._namespaces)
        if isinstance(resolved, Operator):
            self._selection.run.append((node, resolved))
            self._accept_around(outer)
        elif resolved is not None:
            self._refused[index] = (node, resolved)
        is_top = isinstance(resolved, Operator) or resolved in (COMMUNICATION_REASON, RAISED_REASON)
        if is_top or node["kernel_backend"]:
            self._tops.add(index)
        if graph is not None and resolved is not None:
            graph.parts.append(index)
            graph.has_kernels |= bool(node["kernel_backend"])

    def _accept_around(self, outer: int | None) -> None:
        """Remove a node's ancestors from the omitted nodes, since the replay runs a part of each ancestor."""
        while outer is not None:
            self._refused.pop(outer, None)
            outer = self._refused_around.get(outer)

    def finish(self) -> OperatorSelection:
        self._selection.omitted = list(self._refused.values())
        graphs = {id(graph): graph for graph in self._graphs.values()}.values()
        self._selection.compiled = [(graph.node, graph.parts) for graph in graphs if not graph.has_kernels]
        return self._selection


def _enclosing_graph(node: Node, outer: _CompiledGraph | None) -> _CompiledGraph | None:
    """Return the innermost torch.compile call that is or contains the node; None outside of compiled code."""
    return _CompiledGraph(node) if (node["name"] or "").startswith(_COMPILED_PREFIX) else outer


def _resolve_node(node: Node, namespaces: frozenset[str]) -> Operator | str | None:
    """Return a node's operator, or the reason why the replay cannot run it; None if the node is not an operator."""
    if (node["name"] or "").startswith(_COMMUNICATION_PREFIXES):
        return COMMUNICATION_REASON
    if (node["op_schema"] or node["kernel_backend"]) and raised_exception(node["attrs"]):
        return RAISED_REASON
    if node["kernel_backend"]:
        return f"a {str(node['kernel_backend'])[:40]} kernel of torch.compile cannot be replayed"
    return resolve_operator(node["op_schema"], namespaces) if node["op_schema"] else None
