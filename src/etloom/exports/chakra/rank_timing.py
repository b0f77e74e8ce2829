"""Adapt node times to simulators that run one operator, one computation and one communication at a time."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import arrays, categories
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace
from etloom.formats.chakra.protobuf import TYPE_NUMBERS
from etloom.formats.chakra.writing import NodeTable
from etloom.graphs.graph import Int64Array

START_NAME = "start"
_IDLE_CATEGORIES = ("idle", "wait")
_HOST, _COMPUTATION, _COMMUNICATION, _NONE = range(4)


def count_overlaps_once(table: pl.DataFrame) -> pl.DataFrame:
    """Shorten each node by the time during which an earlier node occupies its resource; durations in µs.

    A simulator runs such nodes one after the other. With the overlap counted once, they take together what they took in
    the recording; ``duration_ns`` remains the recorded duration. A thread that is idle gives way to any other.
    """
    starts = table["start_time_micros"].to_numpy()
    durations = table["duration_micros"].to_numpy().copy()
    ends = starts + durations
    resource = _list_resources(table)
    is_idle = table["cat"].is_in(_IDLE_CATEGORIES).fill_null(False).to_numpy()
    for number in (_HOST, _COMPUTATION, _COMMUNICATION):
        rows, idle_rows = (np.flatnonzero((resource == number) & mask) for mask in (~is_idle, is_idle))
        work_starts = _cut_overlaps(starts[rows], ends[rows])
        durations[rows] = ends[rows] - work_starts
        idle_starts = _cut_overlaps(starts[idle_rows], ends[idle_rows])
        busy = Intervals.of(starts[rows], ends[rows])
        durations[idle_rows] = ends[idle_rows] - idle_starts - busy.covered(idle_starts, ends[idle_rows])
    return table.with_columns(pl.Series("duration_micros", durations))


def _cut_overlaps(starts: Int64Array, ends: Int64Array) -> Int64Array:
    """Return each activity's start, moved to the latest end of earlier activities but not past the activity's end."""
    order = np.argsort(starts, kind="stable")
    busy_until = np.maximum.accumulate(np.append(0, ends[order]))[:-1]
    cut = np.empty_like(starts)
    cut[order] = np.minimum(np.maximum(starts[order], busy_until), ends[order])
    return cut


def _list_resources(table: pl.DataFrame) -> Int64Array:
    node_type = table["type"].to_numpy()
    resource = np.where(node_type == TYPE_NUMBERS["COMP_NODE"], _COMPUTATION, _COMMUNICATION)
    resource[node_type == TYPE_NUMBERS["COMM_RECV_NODE"]] = _NONE
    resource[table["is_cpu_op"].to_numpy()] = _HOST
    return resource


def find_start_ns(trace: Trace) -> int:
    """Return the start of the first operator, call or GPU activity of a trace, ns; 0 if there is none."""
    timed = (
        categories.OPERATOR_CATEGORIES
        | categories.ANNOTATION_CATEGORIES
        | categories.RUNTIME_CATEGORIES
        | categories.DEVICE_CATEGORIES
    )
    events = trace.events.select("cat", "ts", "dur")
    is_timed = categories.mask_events(events, timed) & arrays.is_present(events["dur"])
    start = events["ts"].filter(pl.Series(is_timed)).min()
    return int(start) if isinstance(start, int) else 0


def add_start_node(nodes: NodeTable, offset_ns: int) -> NodeTable:
    """Insert a host node that delays all others by ``offset_ns``, with id 1; other ids increase by 1.

    Simulators start all ranks at once. The node takes the time by which the rank starts later than the first one of its
    job; whatever depended on nothing depends on it.
    """
    offset_us = offset_ns // 1000
    table = nodes.table
    start_us = int(table["start_time_micros"].to_numpy().min()) - offset_us
    start_ns = int(table["start_ns"].to_numpy().min()) - 1000 * offset_us
    row = pl.DataFrame(
        {
            "id": [1],
            "name": [START_NAME],
            "type": [TYPE_NUMBERS["COMP_NODE"]],
            "is_cpu_op": [True],
            "cat": ["idle"],
            "start_time_micros": [max(start_us, 0)],
            "duration_micros": [offset_us],
            "start_ns": [start_ns],
            "duration_ns": [1000 * offset_us],
        }
    )
    counts = np.diff(nodes.first)
    independent = np.flatnonzero(counts == 0)
    dependencies = np.insert(nodes.dependencies + 1, nodes.first[:-1][independent], 1)
    first = np.concatenate([[0, 0], np.cumsum(np.maximum(counts, 1))])
    shifted = table.with_columns(pl.col("id", "ctrl") + 1)
    return NodeTable(pl.concat([row, shifted], how="diagonal_relaxed"), first, dependencies)
