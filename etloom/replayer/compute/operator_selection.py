"""Which nodes of an execution trace are run: the top-most that this torch may run; it calls their children itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.replayer.compute.operators import Operator, resolve_operator
from etloom.replayer.recorded_calls import RAISED_REASON, raised_exception

Node = dict[str, Any]
COMMUNICATION_REASON = "communication: etloom replay comms"
COMPILED_REASON = "its kernels were not recorded (C++ never is; Triton is with record_shapes); TORCH_COMPILE_DISABLE=1 helps"
_COMPILED_PREFIX = "## Call CompiledFxGraph"
_COMMUNICATION_PREFIXES = (
    "record_param_comms",
    "c10d::",
    "c10d_functional::",
    "_c10d_functional::",
    "nccl:",
    "gloo:",
)


@dataclass
class OperatorSelection:
    """run: the nodes to run. left_out: those of which neither they nor a part of them can be, with the reason.
    compiled: code that the recording has no operators for, with the ids of the nodes in it that it has. inside: node ->
    the one of these that it is a part of."""

    run: list[tuple[Node, Operator]] = field(default_factory=list)
    left_out: list[tuple[Node, str]] = field(default_factory=list)
    compiled: list[tuple[Node, list[int]]] = field(default_factory=list)
    inside: dict[int, int] = field(default_factory=dict)


def select_operators(nodes: pl.DataFrame, namespaces: frozenset[str]) -> OperatorSelection:
    """Which nodes to run, of whole trees of them."""
    chosen = OperatorSelection()
    refused: dict[int, tuple[Node, str]] = {}
    inside: dict[int, int] = chosen.inside  # of what is run, or left out whole
    whole: set[int] = set()
    around: dict[int, int] = {}  # node -> the innermost refused one that it is in
    graphs: dict[int, _CompiledGraph] = {}  # node -> the compiled graph that it is in
    kernel = ("kernel_backend",)
    columns = ("id", "et_id", "name", "parent", "op_schema", *kernel, "inputs", "attrs")
    # An id that comes twice is the first's: what is around what must end somewhere.
    for node in nodes.select(columns).unique("id", keep="first").sort("id").iter_rows(named=True):
        at, parent = node["id"], node["parent"]
        if parent in whole or parent in inside:
            inside[at] = parent if parent in whole else inside[parent]
            continue
        outer = parent if parent in refused else around.get(parent)
        if outer is not None:
            around[at] = outer
        if (graph := _enclosing_graph(node, graphs.get(parent))) is not None:
            graphs[at] = graph
        found = _resolve_node(node, namespaces)
        if isinstance(found, Operator):
            chosen.run.append((node, found))
            while outer is not None:  # a part of it is run instead
                refused.pop(outer, None)
                outer = around.get(outer)
        elif found is not None:
            refused[at] = (node, found)
        if (
            isinstance(found, Operator)
            or found in (COMMUNICATION_REASON, RAISED_REASON)
            or node["kernel_backend"]
        ):
            whole.add(at)
        if graph is not None and found is not None:
            graph.parts.append(at)
            graph.has_kernels |= bool(node["kernel_backend"])
    chosen.left_out = list(refused.values())
    made = {id(graph): graph for graph in graphs.values()}.values()
    chosen.compiled = [(graph.node, graph.parts) for graph in made if not graph.has_kernels]
    return chosen


@dataclass
class _CompiledGraph:
    """A call of what torch.compile made. parts: operators and kernels in it that were recorded."""

    node: Node
    parts: list[int] = field(default_factory=list)
    has_kernels: bool = False


def _enclosing_graph(node: Node, outer: _CompiledGraph | None) -> _CompiledGraph | None:
    """The innermost call of compiled code that a node is, or is in."""
    return _CompiledGraph(node) if (node["name"] or "").startswith(_COMPILED_PREFIX) else outer


def _resolve_node(node: Node, namespaces: frozenset[str]) -> Operator | str | None:
    """What a node is, or why it is not run; None of one that is no operator."""
    if (node["name"] or "").startswith(_COMMUNICATION_PREFIXES):
        return COMMUNICATION_REASON
    if (node["op_schema"] or node["kernel_backend"]) and raised_exception(node["attrs"]):
        return RAISED_REASON
    if node["kernel_backend"]:
        return f"a {str(node['kernel_backend'])[:40]} kernel of torch.compile cannot be replayed"
    return resolve_operator(node["op_schema"], namespaces) if node["op_schema"] else None
