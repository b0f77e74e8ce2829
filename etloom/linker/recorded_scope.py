"""The GPU activity within the part of a run that the execution trace covers."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.trace import Trace
from etloom.linker.placement import format_example


def count_unscoped_work(trace: Trace) -> Trace:
    """Return the Trace with a row of stats for the GPU activity of other iterations than the execution trace."""
    if not trace.links.height:
        return trace
    unscoped = np.flatnonzero(~is_in_scope(trace, find_launching_nodes(trace)))
    rows = rows_of_ids(trace.events, trace.launches["device_event"][unscoped])
    return trace.count(
        "link.activity_outside_nodes", len(unscoped), format_example(trace.events, np.sort(rows))
    )


def find_launching_nodes(trace: Trace) -> pl.Series:
    """Return for each row of launches the id of the node of the operator around the call, or of the nearest linked
    event around that; null if there is none.
    """
    return find_enclosing_nodes(trace, trace.launches.select(pl.coalesce("operator", "launch")).to_series())


def is_in_scope(trace: Trace, node: pl.Series) -> np.ndarray:
    """Return a mask of launches with a node, or launched between the first and the last linked operator.

    GPU activity without a known launch counts by its own start. If nothing is linked, all are in scope.
    """
    events, launches = trace.events, trace.launches
    linked = rows_of_ids(events, trace.links["event"])
    if not linked.size:
        return np.ones(launches.height, bool)
    starts = events["ts"].to_numpy()
    launch = rows_of_ids(events, launches["launch"])
    when = starts[np.where(launch >= 0, launch, rows_of_ids(events, launches["device_event"]))]
    # What was never closed may last to the end.
    durations = events["dur"][linked]
    last = starts.max() if durations.null_count() else (starts[linked] + durations.to_numpy()).max()
    within = (when >= starts[linked].min()) & (when <= last)
    in_scope: np.ndarray = within | node.is_not_null().to_numpy()
    return in_scope


def find_enclosing_nodes(trace: Trace, events: pl.Series) -> pl.Series:
    """Return for ids of events (or null) the node of each, or of the nearest linked event around it."""
    linked = rows_of_ids(trace.events, trace.links["event"])
    node = np.zeros(trace.events.height + 1, np.uint32)  # the last for -1
    node[linked] = trace.links["node"].to_numpy()
    has = np.zeros(trace.events.height, bool)
    has[linked[linked >= 0]] = True
    linked_rows = nesting.find_nearest_ancestor(
        rows_of_ids(trace.events, trace.events["parent"]), has, rows_of_ids(trace.events, events)
    )
    return pl.Series("node", node[linked_rows]).set(pl.Series(linked_rows < 0), None)
