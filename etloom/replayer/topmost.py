"""Which nodes of an execution trace are run: the top-most that this torch may run; it calls their children itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from etloom.replayer.kernels import Kernels
from etloom.replayer.operators import Operator, resolve
from etloom.replayer.recorded import RAISED, raised

Node = dict[str, Any]
COMMUNICATES = "communication: etloom replay comms"
COMPILED = "its kernels were not recorded (C++ never is; Triton is with record_shapes); TORCH_COMPILE_DISABLE=1 helps"
_COMPILED = "## Call CompiledFxGraph"
_COMMUNICATION = ("record_param_comms", "c10d::", "c10d_functional::", "_c10d_functional::", "nccl:", "gloo:")


@dataclass
class Chosen:
    """run: the nodes to run. left_out: those of which neither they nor a part of them can be, with the reason.
    compiled: code that the recording has no operators for, with the ids of the nodes in it that it has. inside: node ->
    the one of these that it is a part of."""

    run: list[tuple[Node, Operator]] = field(default_factory=list)
    left_out: list[tuple[Node, str]] = field(default_factory=list)
    compiled: list[tuple[Node, list[int]]] = field(default_factory=list)
    inside: dict[int, int] = field(default_factory=dict)


def topmost(nodes: pl.DataFrame, namespaces: frozenset[str], kernels: Kernels) -> Chosen:
    """Which nodes to run, of whole trees of them."""
    chosen = Chosen()
    refused: dict[int, tuple[Node, str]] = {}
    inside: dict[int, int] = chosen.inside  # of what is run, or left out whole
    whole: set[int] = set()
    around: dict[int, int] = {}  # node -> the innermost refused one that it is in
    graphs: dict[int, _Graph] = {}  # node -> the compiled graph that it is in
    kernel = ("kernel_backend", "kernel_file")
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
        if (graph := _graph(node, graphs.get(parent))) is not None:
            graphs[at] = graph
        found = _found(node, namespaces, kernels)
        if isinstance(found, Operator):
            chosen.run.append((node, found))
            while outer is not None:  # a part of it is run instead
                refused.pop(outer, None)
                outer = around.get(outer)
        elif found is not None:
            refused[at] = (node, found)
        if isinstance(found, Operator) or found in (COMMUNICATES, RAISED) or node["kernel_backend"]:
            whole.add(at)
        if graph is not None and found is not None:
            graph.parts.append(at)
            graph.has_kernels |= bool(node["kernel_backend"])
    chosen.left_out = list(refused.values())
    made = {id(graph): graph for graph in graphs.values()}.values()
    chosen.compiled = [(graph.node, graph.parts) for graph in made if not graph.has_kernels]
    return chosen


@dataclass
class _Graph:
    """A call of what torch.compile made. parts: operators and kernels in it that were recorded."""

    node: Node
    parts: list[int] = field(default_factory=list)
    has_kernels: bool = False


def _graph(node: Node, outer: _Graph | None) -> _Graph | None:
    """The innermost call of compiled code that a node is, or is in."""
    return _Graph(node) if (node["name"] or "").startswith(_COMPILED) else outer


def _found(node: Node, namespaces: frozenset[str], kernels: Kernels) -> Operator | str | None:
    """What a node is, or why it is not run; None of one that is no operator."""
    if (node["name"] or "").startswith(_COMMUNICATION):
        return COMMUNICATES
    if (node["op_schema"] or node["kernel_backend"]) and raised(node["attrs"]):
        return RAISED
    if node["kernel_backend"]:
        return kernels.resolve(node)
    return resolve(node["op_schema"], namespaces) if node["op_schema"] else None
