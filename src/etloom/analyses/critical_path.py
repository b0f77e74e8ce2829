"""The critical path: the zero-slack chain of work and waits that determines the run time, grouped by kind.

The path is traced back from the last event, through threads, streams and (via collectives) ranks, each time to the
dependency that was ready last. Its times add up to the makespan. One row per group:

- kind: type of dependency. segment: the innermost open event of a thread. idle: no event is open (Python or the
  operating system). kernel: GPU activity. launch, stream, sync, handoff, return and others: the delay between two
  events; docs/glossary.md defines each kind. later start: the time before the first event of the path, which no
  recorded dependency explains, for example if one rank starts recording later than others.
- The rank is null if the group spans several ranks.
- category, name: of the event that takes the time; of a delay between two events (launch, stream, ...), of the event
  that ends it. operator, module: the innermost ones around the event or, for GPU activity, around its launch: the
  operator of a launch gap is the one that ends it.
- count: number of segments. time_ns: their sum; pct: share of the whole path. unexplained_ns: the time beyond the
  minimum latency of the dependencies.
- explainable: whether the graph explains the recording (as in graph-quality, for all ranks). If it does not, the path
  is only a chain of consecutive events.

Units: ns; start_ns is the start of the first segment, on the trace's clock. Definition: Yang and Miller (1988), on the
graph of etloom.graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import polars as pl

from etloom.analyses.helpers import check_step, check_top, conform_columns
from etloom.analyses.helpers.dependency_graph import build_dependencies, warn_if_unexplained
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.machine import run_both
from etloom.core.text import unknown_rank_error
from etloom.core.trace import Job
from etloom.graphs import critical_paths, quality
from etloom.graphs.graph import Graph
from etloom.timeline.activity import find_steps

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "kind": pl.String,
    "category": pl.String,
    "name": pl.String,
    "operator": pl.String,
    "module": pl.String,
    "event": pl.Int64,
    "count": pl.Int64,
    "start_ns": pl.Int64,
    "time_ns": pl.Int64,
    "unexplained_ns": pl.Int64,
    "pct": pl.Float64,
    "explainable": pl.Boolean,
}
_GROUP_COLUMNS = {
    "kind": ["kind"],
    "category": ["kind", "category"],
    "name": ["kind", "category", "name"],
    "operator": ["operator"],
    "module": ["module"],
    "edge": [],
}
_MIN_REMARK_PCT = 1
"""Percent of the path above which a later start is reported."""


def analyze(
    job: Job,
    *,
    by: Annotated[
        str,
        "Grouping: kind, category, name, operator, module, or edge (every segment, in time order unless "
        "top is set).",
    ] = "kind",
    top: Annotated[int | None, "Maximum number of rows, longest time first (default: all)."] = None,
    rank: Annotated[int | None, "The path to the last event of this rank (default: of any rank)."] = None,
    step: Annotated[
        int | None,
        "The path from the start of this ProfilerStep to the last event of the step, on the given rank "
        "or on the rank where it ends last.",
    ] = None,
) -> pl.DataFrame:
    if by not in _GROUP_COLUMNS:
        raise UnknownName("grouping", by, _GROUP_COLUMNS, option="by")
    check_top(1 if top is None else top)
    if rank is not None and rank not in job:
        raise unknown_rank_error(rank, job)
    graph = build_dependencies(job).graph
    end, begin = _window(graph, job, rank, step)
    if end is None:
        raise AnalysisError(
            f"rank {rank} contains no timed event", remedy="choose another rank, or omit --rank"
        )
    labels = (
        critical_paths.EVENT_LABELS
        if by == "edge"
        else set(_GROUP_COLUMNS[by]) & set(critical_paths.EVENT_LABELS)
    )
    labeler = critical_paths.make_event_labeler(job, labels)
    columns = (
        critical_paths.PATH_SCHEMA if labels else ("rank", "kind", "start_ns", "time_ns", "unexplained_ns")
    )

    def find_path() -> pl.DataFrame:
        chunks = (
            labeler(part).with_columns(count=1, last=pl.col("rank"))
            for part in critical_paths.iterate_critical_path(graph, end, begin, columns)
        )
        if by == "edge":
            return pl.concat(chunks)
        return _sum_groups(pl.concat(_sum_groups(part, by) for part in chunks), by)

    path, unexplained = run_both(find_path, lambda: quality.find_unexplained_ranks(graph, job), len(graph))
    total = int(path["time_ns"].sum())
    missing = [name for name in COLUMNS if name not in (*path.columns, "pct", "explainable")]
    path = path.with_columns(
        pl.when(pl.col("rank") == pl.col("last")).then("rank"),
        (100.0 * pl.col("time_ns") / max(total, 1)).alias("pct"),
        pl.lit(not unexplained).alias("explainable"),
        *(pl.lit(None).alias(name) for name in missing),
    ).with_columns(critical_paths.extract_module_names(pl.col("module")).alias("module"))
    path = conform_columns(path, COLUMNS)
    if by == "edge":
        return path if top is None else path.sort("time_ns", descending=True, maintain_order=True).head(top)
    path = path.sort("time_ns", *_GROUP_COLUMNS[by], descending=[True] + [False] * len(_GROUP_COLUMNS[by]))
    return path if top is None else path.head(top)


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield notes for the terminal on delays and a late start that the dependency graph does not explain."""
    yield from warn_if_unexplained(table, "this path")
    late = table.filter(pl.col("kind") == critical_paths.LATER_START, pl.col("pct") >= _MIN_REMARK_PCT)
    for rank, time_ns, pct in late.select("rank", "time_ns", "pct").iter_rows():
        yield (
            f"later start: for {time_ns / 1e6:,.3f} ms ({pct:.0f} % of the time) no recorded dependency explains the "
            f"start of the path, on rank {rank}: its cause is earlier than that rank's recording, or was not recorded"
        )


def _sum_groups(path: pl.DataFrame, by: str) -> pl.DataFrame:
    """Sum count, time and unexplained time of the critical path's segments, grouped by kind, operator or another
    column."""
    sums = pl.col("count", "time_ns", "unexplained_ns").sum(), pl.col("start_ns").min()
    return path.group_by(_GROUP_COLUMNS[by]).agg(*sums, pl.col("rank").min(), pl.col("last").max())


def _window(graph: Graph, job: Job, rank: int | None, step: int | None) -> tuple[int | None, int | None]:
    """Return the graph point at which the critical path of the run, rank or step ends, and the time (ns) at which it
    starts (None: the graph's start)."""
    if step is None:
        return critical_paths.find_last_point(graph, rank), None
    ends = []
    ranks = (
        [rank] if rank is not None else [number for number in job if step in find_steps(job[number])["step"]]
    )
    if rank is not None or not ranks:
        check_step(job[job.ranks[0] if rank is None else rank], step)
    for number in ranks:
        trace = job[number]
        step_events = trace.events.filter(pl.col("step") == step)["id"]
        point = critical_paths.find_last_point(graph, number, step_events)
        if point is not None:
            start = find_steps(trace).filter(pl.col("step") == step)["start"][0]
            ends.append((int(graph.time[point]), point, int(start)))
    if not ends:
        return None, None
    return max(ends)[1], min(start for _, _, start in ends)
