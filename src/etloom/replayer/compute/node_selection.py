"""Selects the nodes of a recording that a computation replay runs.

It does not import torch, which takes seconds, so that a missing execution trace or step is reported at once.
"""

from __future__ import annotations

import difflib

import polars as pl

from etloom.core import arrays, nesting
from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, find_step_nodes

_MAX_ID = 1 << 62


def select_nodes(trace: Trace, step: int | None = None, subgraph: str | None = None) -> pl.DataFrame:
    """Return rows of the table `nodes`: all, the nodes of a step, or the nodes of a named operator and its descendants.

    Args:
        trace: A linked trace.
        step: Only step N.
        subgraph: Only nodes of this name and what they contain, as PARAM's --subgraph.

    Raises:
        EtloomError: There is no execution trace, no such step, or no node of this name.
    """
    if not trace.nodes.height:
        raise EtloomError(
            "has no execution trace, which computation replay needs",
            where=describe_rank(trace) or "the trace",
            remedy="record one with etloom collect or ExecutionTraceObserver",
        )
    first, last = _step_node_range(trace.nodes, step)
    nodes = trace.nodes.filter(pl.col("id").is_between(first, last, closed="left"))
    return nodes if subgraph is None else _select_subgraph(nodes, subgraph)


def _select_subgraph(nodes: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return the nodes named ``name`` and all their descendants."""
    roots = arrays.match_text(nodes["name"], lambda text: text == name)
    if not roots.any():
        names = nodes["name"].cast(pl.String).drop_nulls().unique().to_list()
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else "specify the name of an operator or annotation"
        raise InvalidValue(f"the execution trace has no node {name!r}", remedy=remedy, option="subgraph")
    ancestors = nesting.find_nearest_ancestor(arrays.rows_of_ids(nodes, nodes["parent"]), roots)
    return nodes.filter(pl.Series(ancestors >= 0))


def _step_node_range(nodes: pl.DataFrame, step: int | None) -> tuple[int, int]:
    """Return (first, end) of the node ids of a step; ids ascend with time, so all threads are included."""
    if step is None:
        return 0, _MAX_ID
    annotations = find_step_nodes(nodes)
    start = annotations.filter(pl.col("step") == step)["id"]
    if not start.len():
        steps = ", ".join(map(str, annotations["step"].to_list())) or "none"
        raise EtloomError(f"the execution trace has no step {step}", remedy=f"its steps are: {steps}")
    later = annotations.filter(pl.col("id") > start[0])["id"]
    return start[0], later[0] if later.len() else _MAX_ID
