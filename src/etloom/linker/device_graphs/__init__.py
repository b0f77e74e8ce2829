"""Device graphs (CUDA, HIP): attribute the kernels of each replay to the operators that its capture recorded.

captures            what a capture recorded, as events without a time
eager_runs          runs of the same kernels without a graph, in place of a capture
replays             the kernels of each replay, in order
sequence_alignment  alignment of their names with a capture's, where it is certain
attribution         the capture of each replay, and the rows of `launches`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.arrays import rows_of_ids, take_rows, to_array
from etloom.core.trace import Trace
from etloom.linker.device_graphs.attribution import attribute_replays
from etloom.linker.device_graphs.captures import (
    CapturedEvents,
    add_captured_events,
    build_captured_events,
    extract_captures,
    split_captured_events,
)
from etloom.linker.device_graphs.replays import Capture, Replays, encode_names, list_captures, list_replays
from etloom.linker.placement import place_events

__all__ = ["add_captures", "attribute_graphs", "split_captured_events"]


def add_captures(trace: Trace, earlier: CapturedEvents | None, captures: Sequence[Trace]) -> Trace:
    """Return the Trace with the graphs captured in it and in other traces added; `place_events` must have run.

    Args:
        trace: The placed Trace.
        earlier: The captured events that an earlier link added; they include its own captures.
        captures: Other traces that contain captures.
    """
    captured = extract_captures(trace) if earlier is None else earlier
    parts = [captured, *(extract_captures(place_events(capture)) for capture in captures)]
    recorded = [part for part in parts if part is not None]
    return add_captured_events(trace, recorded) if recorded else trace


def attribute_graphs(trace: Trace) -> Trace:
    """Return the Trace with the operator of each graph-replayed kernel set in the table `launches`."""
    replays = list_replays(trace)
    if replays is None:
        return trace
    runs = find_eager_runs(trace, replays, list_captures(trace))
    return attribute_replays(trace if runs is None else add_captured_events(trace, [runs]))


# Eager runs of a captured step: the kernels that a graph replays, launched one after the other without the graph.
#
# If no capture was recorded, the operators of an eager run also describe the graph: engines run each step eagerly
# before they capture it, and whenever they cannot replay the graph.

Rows = NDArray[np.int64]

MIN_KERNELS = 3
"""Shorter sequences occur by chance."""
MAX_WINDOWS = 32
MIN_EQUAL_GRIDS = 0.95
"""Least share of kernels with the same grid in graph and eager run, if both state it; below it the shapes differ."""


def find_eager_runs(trace: Trace, replays: Replays, captures: list[Capture]) -> CapturedEvents | None:
    """Create captured events from launches without a graph, for replayed graphs whose capture was not recorded.

    None if there are none.
    """
    events, launches = trace.events, trace.launches
    captured = {capture.codes.tobytes() for capture in captures}
    call = rows_of_ids(events, launches["launch"])
    device = rows_of_ids(events, launches["device_event"])
    replayed = np.zeros(launches.height, np.bool_)
    replayed[replays.pairs] = True
    eager = np.flatnonzero((call >= 0) & (device >= 0) & ~replayed)
    eager = eager[np.lexsort((device[eager], call[eager]))]
    if eager.size < MIN_KERNELS:
        return None
    codes, operators = encode_names(events)[device[eager]], rows_of_ids(events, launches["operator"])[eager]
    grids = _list_grids(trace)
    graphs, names = [], np.full(events.height, None, object)
    seen = set()
    for first, end in zip(replays.bounds[:-1].tolist(), replays.bounds[1:].tolist(), strict=True):
        sequence = replays.codes[first:end]
        key = sequence.tobytes()
        if key in captured or key in seen or sequence.size < MIN_KERNELS:
            continue
        seen.add(key)
        windows = _find_windows(codes, sequence)
        if not windows or len({_describe(trace, operators[at : at + sequence.size]) for at in windows}) > 1:
            continue
        chosen = eager[windows[-1] : windows[-1] + sequence.size]
        if np.unique(call[chosen]).size != chosen.size:
            continue
        if not _grids_agree(grids[device[chosen]], grids[device[replays.pairs[first:end]]]):
            continue
        graphs.append((f"eager run {_format_time(events, int(call[chosen[0]]))}", call[chosen]))
        names[call[chosen]] = events["name"][device[chosen]].cast(pl.String).to_numpy()
    if not graphs:
        return None
    parent = rows_of_ids(events, events["parent"])
    return build_captured_events(trace, parent, graphs, pl.Series(names.tolist(), dtype=pl.String))


def _find_windows(codes: Rows, sequence: Rows) -> list[int]:
    """Return the positions at which a kernel sequence occurs; empty if there are more than `MAX_WINDOWS`."""
    count = codes.size - sequence.size + 1
    if count <= 0:
        return []
    ends = np.flatnonzero((codes[:count] == sequence[0]) & (codes[sequence.size - 1 :] == sequence[-1]))
    windows = [at for at in ends.tolist() if np.array_equal(codes[at : at + sequence.size], sequence)]
    return windows if len(windows) <= MAX_WINDOWS else []


def _describe(trace: Trace, operators: Rows) -> str:
    """Return operators and their input shapes as text, by which two eager runs can be compared."""
    arguments = trace.arguments.select("dims", id="event")
    shapes = take_rows(arguments["dims"], rows_of_ids(arguments, take_rows(trace.events["id"], operators)))
    names = take_rows(trace.events["name"], operators)
    return repr((names.cast(pl.String).to_list(), shapes.cast(pl.String).to_list()))


def _list_grids(trace: Trace) -> Rows:
    """Return the number of thread blocks in the grid of each event; -1 if unknown."""
    blocks = trace.kernels.select(
        id="event", blocks=pl.col("grid_x").cast(pl.Int64) * pl.col("grid_y") * pl.col("grid_z")
    )
    rows = rows_of_ids(blocks, trace.events["id"])
    grids: Rows = to_array(take_rows(blocks["blocks"], rows), -1)
    return grids


def _grids_agree(run: Rows, replay: Rows) -> bool:
    both = (run >= 0) & (replay >= 0)
    return not both.any() or float((run[both] == replay[both]).mean()) >= MIN_EQUAL_GRIDS


def _format_time(events: pl.DataFrame, row: int) -> str:
    return f"{(events['ts'][row] - events['ts'].min()) / 1e6:.3f} ms into the recording"
