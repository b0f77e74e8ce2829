"""Quality of the dependency graph: how well it explains each rank; read it before critical-path or a simulation.

One row per rank, and one with a null rank for the whole job. explainable: whether predictions of the graph are
meaningful; if not, reason says why: a sampled trace, too few kernels, or unexplained delays.

- shortfall_ns: reduction of the makespan if every dependency takes only its minimum latency; max_shortfall_ns: the
  largest such reduction at any point. residual_ns: sum of all unexplained delays; residual_pct of the whole job is
  relative to the sum of the ranks' makespans.
- device_starts: number of kernels, memcpys and memsets. explained_pct: the share that starts within 5 µs after the end
  of the stream's previous work or of what the stream waited for, or between the start of its launch call and 5 µs
  after the end of the call, or while the stream's previous work still ran. chance_pct: the same with all starts shifted
  by 23 µs, as baseline; chance_back_pct: shifted by -17 µs, which is high if launch calls are long. ambiguous_pct:
  explained by both.
- dropped_edges: dependencies that contradict the recorded times, by kind. unmatched_syncs: synchronization calls
  without matching GPU activity. inferred_syncs: synchronization dependencies inferred from calls and times instead of
  recorded. unexplained_wait_ns: time in calls that by their kind wait for the GPU (synchronization, copies to pageable
  memory), while the GPU is busy, that the graph counts as host work. inter_thread_dependencies: threads that
  alternate, or wait for an asynchronous call. matched_communications, local_communications: communications matched with
  other ranks, or not. ignored_threads: threads left out because they only poll, or only run Python.

Units: ns, percent (of the makespan; of device_starts).
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.dependency_graph import build_dependencies
from etloom.core.machine import run_both
from etloom.core.trace import Job
from etloom.graphs import quality
from etloom.graphs.graph import EdgeKind, Graph

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "explainable": pl.Boolean,
    "reason": pl.String,
    "points": pl.Int64,
    "edges": pl.Int64,
    "makespan_ns": pl.Int64,
    "shortfall_ns": pl.Int64,
    "shortfall_pct": pl.Float64,
    "max_shortfall_ns": pl.Int64,
    "residual_ns": pl.Int64,
    "residual_pct": pl.Float64,
    "device_starts": pl.Int64,
    "explained_pct": pl.Float64,
    "chance_pct": pl.Float64,
    "chance_back_pct": pl.Float64,
    "ambiguous_pct": pl.Float64,
    "dropped_edges": pl.String,
    "unmatched_syncs": pl.Int64,
    "inferred_syncs": pl.Int64,
    "unexplained_wait_ns": pl.Int64,
    "inter_thread_dependencies": pl.Int64,
    "matched_communications": pl.Int64,
    "local_communications": pl.Int64,
    "ignored_threads": pl.Int64,
}
_COUNTS = {
    "unmatched_syncs": ("lost_waits",),
    "inferred_syncs": ("inferred_waits",),
    "inter_thread_dependencies": ("handoffs", "completion_waits"),
    "matched_communications": ("matched_communications",),
    "local_communications": ("local_communications",),
    "ignored_threads": ("threads_aside",),
}
"""Columns that count, and the counts of the graph that each adds up."""


def analyze(job: Job) -> pl.DataFrame:
    dependencies = build_dependencies(job)
    graph = dependencies.graph

    def measure(rank: int, part: Graph) -> tuple[quality.ExplainedStarts, int]:
        waits = quality.measure_unexplained_waits(part, job[rank], rank)
        return quality.measure_explained_starts(part, job[rank], rank), waits

    latency_fits, measured = run_both(
        lambda: quality.measure_fit_by_rank(graph, job.ranks),
        lambda: {rank: measure(rank, part) for rank, part in graph.split_by_rank(job.ranks)},
        len(graph),
    )
    rows = []
    for rank, (starts, waits) in measured.items():
        fit, counts = latency_fits[rank], dependencies.counts[rank]
        misfit = quality.explain_misfit(starts, fit.makespan, fit.residual, waits)
        rows.append(
            {
                "rank": rank,
                "explainable": misfit is None,
                "reason": None if misfit is None else misfit.reason,
                **_fit_columns(fit),
                **_start_columns(starts),
                "unexplained_wait_ns": waits,
                **{name: sum(counts[key] for key in keys) for name, keys in _COUNTS.items()},
            }
        )
    table = pl.DataFrame(rows, infer_schema_length=None)
    total_makespan = sum(latency_fits[rank].makespan for rank in job.ranks)
    dropped = [f"{EdgeKind(kind).label} {count}" for kind, count in enumerate(graph.dropped) if count]
    job_row = {
        "rank": None,
        "explainable": bool(table["explainable"].all()),
        "reason": _first_reason(table),
        **_fit_columns(latency_fits[None]),
        "residual_pct": 100 * latency_fits[None].residual / total_makespan if total_makespan else None,
        "device_starts": table["device_starts"].sum(),
        "unexplained_wait_ns": table["unexplained_wait_ns"].sum(),
        "dropped_edges": ", ".join(dropped) or None,
        **{name: table[name].sum() for name in _COUNTS},
    }
    job_table = pl.DataFrame([job_row], infer_schema_length=None)
    return conform_columns(pl.concat([table, job_table], how="diagonal_relaxed"), COLUMNS)


def _start_columns(starts: quality.ExplainedStarts) -> dict[str, float | None]:
    """Return the columns on GPU activity starts: their number, and the percentage that the dependency graph
    explains."""
    shares = {
        "explained_pct": starts.share,
        "chance_pct": starts.by_chance[0],
        "chance_back_pct": starts.by_chance[2],
        "ambiguous_pct": starts.ambiguous,
    }
    percents = {name: 100 * share if starts.starts else None for name, share in shares.items()}
    return {"device_starts": starts.starts, **percents}


def _fit_columns(fit: quality.LatencyFit) -> dict[str, float | None]:
    """Return the columns on the recorded makespan and on the delays that the dependency graph leaves unexplained."""

    def percent(part: int) -> float | None:
        return 100 * part / fit.makespan if fit.makespan else None

    return {
        "points": fit.points,
        "edges": fit.edges,
        "makespan_ns": fit.makespan,
        "shortfall_ns": -fit.shortfall,
        "shortfall_pct": percent(-fit.shortfall),
        "max_shortfall_ns": fit.latest,
        "residual_ns": fit.residual,
        "residual_pct": percent(fit.residual),
    }


def _first_reason(table: pl.DataFrame) -> str | None:
    """Return the reason why the dependency graph does not explain the recording, for the first such rank; None if no
    rank."""
    unexplained = table.filter(~pl.col("explainable"))
    if not unexplained.height:
        return None
    return f"rank {unexplained['rank'][0]}: {unexplained['reason'][0]}"
