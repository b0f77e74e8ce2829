"""Device graphs (CUDA, HIP): attribute the kernels of each replay to the operators that its capture recorded.

captures            what a capture recorded, as events without a time
eager_runs          runs of the same kernels without a graph, in place of a capture
replays             the kernels of each replay, in order
sequence_alignment  alignment of their names with a capture's, where it is certain
attribution         the capture of each replay, and the rows of `launches`
"""

from __future__ import annotations

from collections.abc import Sequence

from etloom.core.trace import Trace
from etloom.linker.device_graphs.attribution import attribute_replays
from etloom.linker.device_graphs.captures import (
    CapturedEvents,
    add_captured_events,
    extract_captures,
    split_captured_events,
)
from etloom.linker.device_graphs.eager_runs import find_eager_runs
from etloom.linker.device_graphs.replays import list_captures, list_replays
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
