"""The dependency graph of a job: points in time (starts and ends of events), and edges that show what waits for what.

    graph               the Graph type
    algorithms          times with changed lags, longest path, slack, reachability
    builder             from a linked Trace or Job to its DependencyGraph
    event_arrays        the recorded events as arrays
    host_threads        host threads as chains of points; each segment is the time of the innermost open event
    gpu_activities      GPU activities, their launches, their order on a stream
    stream_waits        streams that wait for streams; when blocking calls submitted their work
    synchronization     host calls that wait for GPU activities
    inter_thread        threads that work in turns
    collective_edges    collectives: arrival of all ranks, then transfer
    transfers           the edges that transfer data, and the events that own edges
    minimum_latencies   the minimum latency of each kind of edge
    critical_paths      the critical path as a table
    contraction         the graph without the points of its chains, for times after changes
    quality             how far a graph explains a recording

The definition and its limits are in docs/decisions/0020 to 0023.
"""

from __future__ import annotations

from etloom.graphs.builder import DependencyGraph, build_graph, check_timed
from etloom.graphs.graph import EdgeKind, Graph, PointRole
from etloom.graphs.minimum_latencies import MinimumLatencies

__all__ = [
    "DependencyGraph",
    "EdgeKind",
    "Graph",
    "MinimumLatencies",
    "PointRole",
    "build_graph",
    "check_timed",
]
