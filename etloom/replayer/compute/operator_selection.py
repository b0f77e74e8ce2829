"""Selects the nodes of an execution trace to run: the topmost operators that may run, which call their children."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.replayer.compute.operators import Operator, resolve_operator
from etloom.replayer.recorded_calls import RAISED_REASON, raised_exception

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
