"""Computes HTA's critical path of the part of a rank inside an annotation, from etloom's dependency graph.

A node is a point in time: the start or the end of an event. An edge is the piece of the path between two nodes. The
graph contains only the path, whereas HTA's graph contains all events inside the annotation.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import api
from etloom.api.arguments import writing
from etloom.compat.hta import overlays
from etloom.compat.hta.frames import (
    US,
    HtaTrace,
    RunAccess,
    add_frame_index,
    frame_to_pandas,
    shorten_kernel_name,
)
from etloom.core import categories
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import AnalysisError, ReadError
from etloom.core.paths import expand_home
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job, Trace
from etloom.exports.chrome.graph_overlays import build_edge_arrows
from etloom.formats.io.atomic_file import open_atomic
from etloom.formats.io.parquet_input import PARQUET_ERRORS
from etloom.linker.selection import keep_events

if TYPE_CHECKING:
    import pandas as pd

_TYPE = {
    **dict.fromkeys(("segment", "kernel"), "critical_path_operator"),
    "launch": "critical_path_kernel_launch_delay",
    "stream": "critical_path_kernel_kernel_delay",
    **dict.fromkeys(("sync", "wait"), "critical_path_sync_dependency"),
}
"""Kind of an edge -> HTA's type; any other is a dependency."""
_DEPENDENCY = "critical_path_dependency"
_DATA_LOADING = "data_loading"
_PATH_FILE, _EVENTS_FILE, _FACTS_FILE = "path.parquet", "events.parquet", "facts.json"


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


@dataclass(frozen=True)
class CPGraph:
    """The critical path through a part of a rank: ``job`` holds that part, ``path`` has a row per edge of the path."""

    job: Job
    path: pl.DataFrame
    t: HtaTrace
    data_load_events: Sequence[str] = ()

    def get_critical_path_breakdown(self) -> pd.DataFrame:
        """Return a row per edge of the path in time order, with its event, duration (us), type and limiting resource.

        Columns: event_idx, duration (us), type, s_name, cat (the frame's number), pid, tid, stream, index, bound_by.
        Edges without an event have NaN in the event's columns.
        """
        events = pl.concat(
            add_frame_index(
                trace, trace.events.select("id", "pid", "tid", pl.col("stream").fill_null(-1))
            ).with_columns(rank=pl.lit(rank, pl.Int64))
            for rank, trace in self.job.items()
        )
        number = self.t.symbol_table.sym_index
        named = categories.add_kernel_type(self.path.rename({"category": "cat"}))
        pieces = named.with_columns(pl.col("event").cast(pl.UInt32)).join(
            events, left_on=["rank", "event"], right_on=["rank", "id"], how="left", maintain_order="left"
        )
        return frame_to_pandas(
            pieces.select(
                event_idx="index",
                duration=pl.col("time_ns") / US,
                type=_edge_type("kind_of", "cat"),
                s_name=pl.col("name").map_elements(shorten_kernel_name, pl.String),
                cat=pl.col("cat")
                .cast(pl.String)
                .replace_strict(number, default=None, return_dtype=pl.Float64),
                pid="pid",
                tid="tid",
                stream="stream",
                index="index",
                bound_by=self._bound_by(),
            )
        )

    @property
    def rank(self) -> int:
        """The number of the rank through which the path runs."""
        return next(iter(self.job))

    @property
    def trace_df(self) -> pd.DataFrame:
        """The events of the rank as a pandas frame with HTA's columns."""
        return self.t.get_trace(self.rank)

    def critical_path(self) -> bool:
        """Return True, because the path is computed already; HTA computes it in this method."""
        return True

    @cached_property
    def _nodes(self) -> PathNodes:
        starts = [(start - self.t.zero) / US for start in self.path["start_ns"]]
        return _list_nodes(self.get_critical_path_breakdown(), starts, self.trace_df)

    @property
    def node_list(self) -> list[CPNode]:
        """The nodes of the path; HTA's list contains the nodes of all events."""
        return self._nodes.nodes

    @property
    def critical_path_nodes(self) -> list[int]:
        """The indices of the path's nodes in ``node_list``, in time order."""
        return list(range(len(self._nodes.nodes)))

    @property
    def critical_path_events_set(self) -> set[int]:
        """The indices, in the frame of the rank, of the events that start or end at a node of the path."""
        return {node.ev_idx for node in self._nodes.nodes}

    @property
    def critical_path_edges_set(self) -> set[CPEdge]:
        """The edges of the path, as a set of `CPEdge`."""
        return set(self._nodes.edges)

    def get_nodes_for_event(self, ev_id: int) -> tuple[CPNode | None, CPNode | None]:
        """Return the nodes at the start and at the end of an event; None for a node that is not on the path."""
        nodes = [node for node in self._nodes.nodes if node.ev_idx == ev_id]
        start, end = ([node for node in nodes if node.is_start == is_start] for is_start in (True, False))
        return start[0] if start else None, end[-1] if end else None

    def get_events_for_edge(self, edge: CPEdge) -> tuple[int, int]:
        """Return the frame indices of the events at the begin and end node of an edge; -1 for nodes without event."""
        return self._nodes.nodes[edge.begin].ev_idx, self._nodes.nodes[edge.end].ev_idx

    def get_event_attribution_for_edge(self, edge: CPEdge) -> int | None:
        """Return the frame index of the event whose time the edge covers; None if it covers no event."""
        event = self._nodes.events[edge.begin]
        return None if event < 0 else event

    def get_edges_attributed_to_event(self, ev_idx: int) -> list[CPEdge]:
        """Return the edges of the path whose time belongs to the event with frame index ``ev_idx``."""
        return [edge for edge in self._nodes.edges if self._nodes.events[edge.begin] == ev_idx]

    def show_critical_path(self) -> None:
        """Print the nodes of the path."""
        for node in self._nodes.nodes:
            print(node)

    def summary(self) -> pd.Series:
        """Return the share of the critical path's duration, in percent, by limiting resource (``bound_by``)."""
        table = self.get_critical_path_breakdown().groupby("bound_by")["duration"].sum()
        return 100 * table / table.sum()

    def save(self, out_dir: str | PathLike[str]) -> str:
        """Save the path to ``out_dir``.zip for `restore_cpgraph`, and return the name of that file.

        Raises:
            EtloomError: The file cannot be written.
        """
        target = Path(f"{expand_home(out_dir)}.zip")
        ((_, part),) = self.job.items()
        tables = {_PATH_FILE: self.path, _EVENTS_FILE: part.events.select("id")}
        with writing(target), open_atomic(target) as file, zipfile.ZipFile(file, "w") as archive:
            for name, table in tables.items():
                content = io.BytesIO()
                table.write_parquet(content)
                archive.writestr(name, content.getvalue())
            archive.writestr(_FACTS_FILE, json.dumps({"data_load_events": list(self.data_load_events)}))
        return str(target)

    def _bound_by(self) -> pl.Expr:
        loads = [pl.col("name").str.contains(part, literal=True) for part in self.data_load_events]
        return (
            pl.when(pl.col("kind_of") == "launch")
            .then(pl.lit("gpu_kernel_launch_overhead"))
            .when(pl.col("kind_of") == "stream")
            .then(pl.lit("gpu_kernel_kernel_overhead"))
            .when(pl.col("kind") == "communication")
            .then(pl.lit("gpu_communication_bound"))
            .when(pl.col("kind").is_not_null())
            .then(pl.lit("gpu_compute_bound"))
            .when(pl.any_horizontal(*loads, pl.lit(False)).fill_null(False))
            .then(pl.lit(_DATA_LOADING))
            .when(pl.col("kind_of").is_in(["segment", "idle", "wait"]))
            .then(pl.lit("cpu_bound"))
            .otherwise(pl.lit(""))
        )


def restore_cpgraph(zip_filename: str | PathLike[str], t_full: HtaTrace, rank: int) -> CPGraph:
    """Read a critical path from a file that `CPGraph.save` wrote.

    Args:
        zip_filename: The file.
        t_full: The run that it was computed on, ``TraceAnalysis(...).t``.
        rank: Its rank.

    Raises:
        UnknownRank: The run does not hold the rank.
        ReadError: The file cannot be read, or is not of `CPGraph.save`.
    """
    if rank not in t_full.job:
        raise unknown_rank_error(rank, t_full.job)
    trace = t_full.job[rank]
    try:
        with zipfile.ZipFile(expand_home(zip_filename)) as archive:
            path, ids = (
                pl.read_parquet(io.BytesIO(archive.read(name)), hive_partitioning=False)
                for name in (_PATH_FILE, _EVENTS_FILE)
            )
            loads = json.loads(archive.read(_FACTS_FILE))["data_load_events"]
    except (*PARQUET_ERRORS, KeyError, TypeError, zipfile.BadZipFile) as error:
        problem = f"is not a saved critical path: {error}"
        raise ReadError(problem, where=zip_filename, remedy="name a file that CPGraph.save wrote") from None
    part = keep_events(trace, trace.events["id"].is_in(ids["id"].implode()).to_numpy())
    return CPGraph(Job({rank: part}), path, t_full, tuple(loads))


class CriticalPath(RunAccess):
    """The methods of TraceAnalysis about the critical path."""

    def critical_path_analysis(
        self,
        rank: int,
        annotation: str,
        instance_id: int | tuple[int, int] | None = None,
        data_load_events: Sequence[str] | None = None,
    ) -> tuple[CPGraph, bool] | None:
        """Return the critical path of the work that starts in an annotation, as (CPGraph, True); None without match.

        The name of the annotation contains ``annotation``; ``instance_id`` selects its instances by number, or by first
        and last number (default: the first instance).
        """
        ((_, trace),) = self._select_ranks([rank])
        marks = _instances(trace, annotation)
        first, last = instance_id if isinstance(instance_id, tuple) else (instance_id or 0, instance_id or 0)
        instances = marks[first : last + 1]
        if annotation and not instances.height:
            return None
        job = Job({rank: trace})
        if annotation:
            start, end = instances.select(pl.col("ts").min(), end=(pl.col("ts") + pl.col("dur")).max()).row(0)
            job = Job({rank: keep_events(trace, _begun(trace, start, end))})
        path = api.analyze(job, "critical-path", by="edge").rename({"kind": "kind_of"})
        return CPGraph(job, path, self.t, tuple(data_load_events or ())), True

    def overlay_critical_path_analysis(
        self,
        rank: int,
        critical_path_graph: CPGraph,
        output_dir: str | PathLike[str],
        only_show_critical_events: bool = True,
        show_all_edges: bool = False,
    ) -> str:
        """Write a trace that shows the critical path to output_dir/overlaid_critical_path_NAME, and return that file.

        Events on the path get the argument ``critical``. Arrows named critical_path show the path's dependencies,
        launches and synchronizations, with the arguments type (as in get_critical_path_breakdown), critical and weight
        (us).

        only_show_critical_events: keep only events on the path, annotations and Python frames. show_all_edges: draw
        every edge between different events; needs only_show_critical_events=False.
        """
        if rank not in critical_path_graph.job:
            raise AnalysisError(
                f"the path does not belong to rank {rank}", remedy="pass the rank for which it was computed"
            )
        target = expand_home(output_dir) / overlays.overlay_path(self._source(rank), "overlaid_critical_path")
        edges = build_edge_arrows(critical_path_graph.job[rank], overlays.FIRST_EDGE)
        overlay = overlays.add_critical_path(
            self.full_job[rank],
            critical_path_graph.path,
            edges.with_columns(type=_edge_type("kind", "category")),
            only_show_critical_events,
            show_all_edges,
        )
        return str(api.export(overlay, target, "chrome"))


def _edge_type(kind: str, category: str) -> pl.Expr:
    """Return an expression for HTA's type of a critical-path edge, from its columns ``kind`` and ``category``.

    Time of the host outside operators and calls, be it in an annotation, is a dependency between operators.
    """
    between = (pl.col(kind) == "segment") & pl.col(category).is_in(sorted(categories.ANNOTATION_CATEGORIES))
    named = pl.col(kind).cast(pl.String).replace_strict(_TYPE, default=_DEPENDENCY)
    return pl.when(between.fill_null(False)).then(pl.lit(_DEPENDENCY)).otherwise(named)


def _instances(trace: Trace, annotation: str) -> pl.DataFrame:
    """Return ts and dur (ns) of the host annotations whose names contain ``annotation``, ordered by ts."""
    marks = trace.events.filter(
        pl.col("cat").is_in(sorted(categories.ANNOTATION_CATEGORIES)) & pl.col("dur").is_not_null()
    )
    return marks.filter(pl.col("name").cast(pl.String).str.contains(annotation, literal=True)).sort("ts")


def _begun(trace: Trace, start: int, end: int) -> NDArray[np.bool_]:
    """Return a mask of the host events that start between two times (ns), and of the GPU activity they launched."""
    events, launches = trace.events, trace.launches
    device = categories.mask_events(events, categories.DEVICE_CATEGORIES)
    keep: NDArray[np.bool_] = ~device & events["ts"].is_between(start, end).fill_null(False).to_numpy()
    call, work = (rows_of_ids(events, launches[column]) for column in ("launch", "device_event"))
    keep[work[(call >= 0) & (work >= 0) & keep[call]]] = True
    return keep


def _list_nodes(pieces: pd.DataFrame, starts: list[float], frame: pd.DataFrame) -> PathNodes:
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
