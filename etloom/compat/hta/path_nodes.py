"""Creates HTA's nodes and edges of a critical path from the edges of etloom's path.

A node is the point in time between two pieces: the start or the end of an event. Edges are the pieces. HTA's graph has
nodes for all events of the part; this one has those of the path only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class CPNode:
    """A node of the critical path: start or end of the event with frame index ``ev_idx`` (-1: none); ``ts`` in us."""

    idx: int = -1
    ev_idx: int = -1
    ts: float = 0
    is_start: bool = False
    is_blocking: bool = False


class CPEdgeType(Enum):
    """HTA's types of critical-path edges."""

    OPERATOR_KERNEL = "critical_path_operator"
    DEPENDENCY = "critical_path_dependency"
    KERNEL_LAUNCH_DELAY = "critical_path_kernel_launch_delay"
    KERNEL_KERNEL_DELAY = "critical_path_kernel_kernel_delay"
    SYNC_DEPENDENCY = "critical_path_sync_dependency"


@dataclass(frozen=True)
class CPEdge:
    """An edge of the critical path between two consecutive nodes; ``weight`` is its duration in us."""

    begin: int
    end: int
    weight: float = 0
    type: CPEdgeType = CPEdgeType.OPERATOR_KERNEL


@dataclass(frozen=True)
class PathNodes:
    """The nodes and edges of a path in time order, and the frame index of each edge's event (-1: no event)."""

    nodes: list[CPNode]
    edges: list[CPEdge]
    events: list[int]


def list_path_nodes(pieces: pd.DataFrame, starts: list[float], frame: pd.DataFrame) -> PathNodes:
    """Convert a critical path to HTA's nodes and edges.

    Args:
        pieces: as `CPGraph.get_critical_path_breakdown` returns them, in order of time.
        starts: the start of each piece, in us on the clock of the frame.
        frame: the events of the rank, by their number.
    """
    events = [-1 if number != number else int(number) for number in pieces["event_idx"]]
    durations = [float(duration) for duration in pieces["duration"]]
    times = [*starts, starts[-1] + durations[-1]] if starts else []
    spans = {
        event: (float(frame.at[event, "ts"]), float(frame.at[event, "ts"] + frame.at[event, "dur"]))
        for event in set(events)
        if event >= 0
    }
    nodes = []
    for number, (before, after) in enumerate(pairwise([-1, *events, -1])):
        event, is_start = _find_event(before, after, times[number], spans)
        nodes.append(CPNode(number, event, times[number], is_start))
    edges = [
        CPEdge(number, number + 1, duration, CPEdgeType(kind))
        for number, (duration, kind) in enumerate(zip(durations, pieces["type"], strict=True))
    ]
    return PathNodes(nodes if edges else [], edges, events)


def _find_event(
    before: int, after: int, time: float, spans: dict[int, tuple[float, float]], tolerance: float = 0.0015
) -> tuple[int, bool]:
    """Return the event (frame index) at a path node and whether it starts there; the next edge's event is preferred."""
    if after >= 0 and abs(spans[after][0] - time) <= tolerance:
        return after, True
    if before >= 0 and abs(spans[before][1] - time) <= tolerance:
        return before, False
    return (before, False) if before >= 0 else (after, True)
