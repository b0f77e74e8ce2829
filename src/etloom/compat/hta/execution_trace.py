"""HTA's ``hta.common.execution_trace``: execution-trace columns for a frame of events."""

from __future__ import annotations

import json
from os import PathLike
from typing import TYPE_CHECKING, Any

import polars as pl

from etloom import api
from etloom.compat.hta.frames import HtaTrace, frame_indices
from etloom.core.errors import EtloomError, ReadError, UnknownName
from etloom.core.paths import expand_home
from etloom.core.trace import Trace
from etloom.formats.execution_trace.node_json import NodeTexts

if TYPE_CHECKING:
    import pandas as pd

_SIDES = {
    f"{side}_{part}": (number, part)
    for number, side in enumerate(("input", "output"))
    for part in ("shapes", "types", "values", "strides")
}


def load_execution_trace(et_file: str | PathLike[str]) -> Trace:
    """Read an execution-trace file of any schema. Raises ReadError."""
    trace = api.read(expand_home(et_file))
    if not isinstance(trace, Trace) or not trace.nodes.height:
        raise ReadError(
            "is not an execution trace", where=et_file, remedy="name the file with the operators' nodes"
        )
    return trace


def correlate_execution_trace(trace: HtaTrace, rank: int, et: Trace) -> None:
    """Add the column ``et_node`` to the frame of a rank: the id of each event's execution-trace node, NaN for none.

    Raises LinkError where the two are not of one program; HTA logs a message, or joins unrelated nodes.
    """
    frame = trace.get_trace(rank)
    linked = api.link(et, _unlinked(trace.job[rank]))
    nodes = linked.links.join(linked.nodes.select("id", "et_id"), left_on="node", right_on="id")
    placed = nodes.join(frame_indices(trace.job[rank]), left_on="event", right_on="id")
    node_by_index = dict(placed.select("index", "et_id").iter_rows())
    frame["et_node"] = [float(node_by_index.get(index, float("nan"))) for index in frame["index"].tolist()]


def add_et_column(trace_df: pd.DataFrame, et: Trace, column: str) -> None:
    """Add a column of the execution-trace nodes, such as input_shapes, to a frame with the column ``et_node``.

    column: et_node_name, op_schema, input_shapes, input_types, output_shapes, output_types, also input_values,
    input_strides, ..., and any column of the nodes table.

    Raises EtloomError without ``et_node``, and UnknownName.
    """
    if "et_node" not in trace_df:
        raise EtloomError("the frame has no column et_node", remedy="call correlate_execution_trace first")
    node_ids = {int(node) for node in trace_df["et_node"].dropna()}
    nodes = et.nodes.filter(pl.col("et_id").is_in(sorted(node_ids)))
    values = dict(zip(nodes["et_id"].to_list(), _values(et, nodes, column), strict=True))
    trace_df[column] = [values.get(int(node)) if node == node else None for node in trace_df["et_node"]]


def _values(et: Trace, nodes: pl.DataFrame, column: str) -> list[Any]:
    if column in _SIDES:
        side, part = _SIDES[column]
        return [json.loads(text)[part] for text in NodeTexts(et).format_arguments(nodes)[side]]
    name = {"et_node_name": "name"}.get(column, column)
    if name not in nodes.columns:
        column_names = ["et_node_name", *_SIDES, *nodes.columns]
        raise UnknownName("column of execution-trace nodes", column, column_names)
    values = nodes[name]
    return (values.fill_null("") if name == "op_schema" else values).to_list()


def _unlinked(trace: Trace) -> Trace:
    """Return the trace of a rank without its execution trace, so that another execution trace can be linked."""
    rest = {name: trace.table(name).clear() for name in ("nodes", "tensors", "links")}
    comms = trace.comms.with_columns(node=pl.lit(None, pl.UInt32))
    return trace.replace({"linked": None}, **rest, comms=comms)
