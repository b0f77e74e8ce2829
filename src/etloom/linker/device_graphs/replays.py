"""Replays and captures of device graphs as sequences of kernels: rows, order and codes of kernel names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories, names
from etloom.core.arrays import match_text, rows_of_ids, to_array
from etloom.core.categories import CAPTURED_CALL, CAPTURED_GRAPH, CAPTURED_OPERATOR
from etloom.core.nesting import find_nearest_ancestor
from etloom.core.trace import Trace
from etloom.linker.device_graphs.captures import API_CALL
from etloom.linker.device_graphs.sequence_alignment import UNKNOWN, Codes

Rows = NDArray[np.int64]

_MEMORY_CODES = {"memcpy": -3, "memset": -4}
_MEMORY_NAMES = {
    "memcpy": r"^(?:(?:cuda|cu|hip)\w*)?Memcpy|^Copy(?:Host|Device)To|rocclr_copyBuffer",
    "memset": r"^(?:(?:cuda|cu|hip)\w*)?Memset|^FillBuffer|rocclr_fillBuffer",
}


@dataclass(frozen=True)
class Replays:
    """The GPU activities of all graph replays of a trace, grouped by replay in order of launch.

    Attributes:
        launch: Row in events of the call that launched each replay.
        pairs: Rows of `launches` of all replays, those of one replay together and in order of its nodes.
        bounds: Replay i has pairs[bounds[i]:bounds[i + 1]].
        codes: Code of the kernel name of each of ``pairs``.
    """

    launch: Rows
    pairs: Rows
    bounds: Rows
    codes: Codes


@dataclass(frozen=True)
class Capture:
    """A captured graph: its name, batch size, calls in order, and the operator and kernel name of each call.

    Attributes:
        row: Row in events of its `captured_graph`.
        name: Its name.
        tokens: Batch size that its name states.
        calls: Rows in events of its calls, in order.
        operators: Row of the operator around each call, or -1.
        codes: Code of the kernel name of each call; `UNKNOWN` where the capture does not state it.
    """

    row: int
    name: str
    tokens: int | None
    calls: Rows
    operators: Rows
    codes: Codes


def list_replays(trace: Trace) -> Replays | None:
    """Return the graph replays of a trace with the table `launches`; None if there are none."""
    events, launches = trace.events, trace.launches
    call = rows_of_ids(events, launches["launch"])
    is_graph = categories.match_names(events, categories.GRAPH_LAUNCH)
    pairs = np.flatnonzero((call >= 0) & is_graph[call])
    if not pairs.size:
        return None
    device = rows_of_ids(events, launches["device_event"][pairs])
    pairs, device = pairs[device >= 0], device[device >= 0]
    order = np.lexsort((device, _node_order(trace, device), call[pairs]))
    pairs, device = pairs[order], device[order]
    launch, first = np.unique(call[pairs], return_index=True)
    return Replays(launch, pairs, np.append(first, pairs.size), encode_names(events)[device])


def list_captures(trace: Trace) -> list[Capture]:
    """Return the captured graphs of a trace, from its events of the category `captured_graph`."""
    events = trace.events
    graphs = np.flatnonzero(categories.mask_events(events, (CAPTURED_GRAPH,)))
    if not graphs.size:
        return []
    parent = rows_of_ids(events, events["parent"])
    calls = np.flatnonzero(categories.mask_events(events, (CAPTURED_CALL,)))
    calls = calls[~np.isin(calls, parent)]  # a driver call inside a runtime call is the node
    graph = find_nearest_ancestor(parent, categories.mask_events(events, (CAPTURED_GRAPH,)), calls)
    operators = find_nearest_ancestor(parent, categories.mask_events(events, (CAPTURED_OPERATOR,)), calls)
    codes = encode_names(events)
    captures = []
    for row in graphs.tolist():
        of_graph = graph == row
        name = str(events["name"][row])
        match = names.match_name("captures", name)
        captures.append(
            Capture(
                row,
                name,
                names.read_number(match, "tokens"),
                calls[of_graph],
                operators[of_graph],
                codes[calls[of_graph]],
            )
        )
    return captures


def encode_names(events: pl.DataFrame) -> Codes:
    """Return an integer code for the kernel name of each event.

    Equal for names that stand for the same graph node: all memcpys, all memsets.
    """
    codes = to_array(events["name"].to_physical(), UNKNOWN).astype(np.int64)
    calls = categories.mask_events(events, (CAPTURED_CALL,))
    unnamed = calls & match_text(events["name"], API_CALL)
    codes[unnamed] = UNKNOWN
    for kind, pattern in _MEMORY_NAMES.items():
        mask = match_text(events["name"], pattern)
        codes[mask] = _MEMORY_CODES[kind]
    return codes


def _node_order(trace: Trace, device: Rows) -> NDArray[np.int64]:
    """Return the sort key of GPU activities within a replay: the graph node id, or the start if ids are missing."""
    starts = to_array(trace.events["ts"], 0)[device]
    nodes = trace.kernels.select("graph_node_id", id="event").drop_nulls()
    if not nodes.height:
        return starts
    rows = rows_of_ids(nodes, trace.events["id"][device])
    return to_array(nodes["graph_node_id"], 0)[rows] if (rows >= 0).all() else starts
