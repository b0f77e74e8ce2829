"""How well the dependency graph explains each rank; read it before critical-path or a simulation.

One row per rank, and one with a null rank for the whole job. explainable: whether predictions of the graph are
meaningful; if not, reason says why: a sampled trace, too few kernels, or unexplained delays.

- shortfall_ns: reduction of the makespan if every dependency takes only its minimum latency; max_shortfall_ns: the
  largest such reduction at any point. residual_ns: sum of all unexplained delays; residual_pct of the whole job is
  relative to the sum of the ranks' makespans.
- device_starts: number of kernels, memcpys and memsets. explained_pct: the share that starts within 5 us after the end
  of the stream's previous work or of what the stream waited for, or between the start of its launch call and 5 us
  after the end of the call, or while the stream's previous work still ran. chance_pct: the same with all starts shifted
  by 23 us, as baseline; chance_back_pct: shifted by -17 us, which is high if launch calls are long. ambiguous_pct:
  explained by both.
- dropped_edges: dependencies that contradict the recorded times, by kind. unmatched_syncs: synchronization calls
  without matching GPU activity. inferred_syncs: synchronization dependencies inferred from calls and times instead of
  recorded. inter_thread_dependencies: threads that alternate, or wait for an asynchronous call.
  matched_communications, local_communications: communications matched with other ranks, or not. ignored_threads:
  threads left out because they only poll, or only run Python.

Units: ns, percent (of the makespan; of device_starts).
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.dependency_graph import build_dependencies
from etloom.core.trace import Job
from etloom.graphs import quality
from etloom.graphs.algorithms import EdgeKind

SCOPE = "job"
COLUMNS = {
    "rank": pl.Int64,
    "explainable": pl.Boolean,
    "why_not": pl.String,
    "points": pl.Int64,
    "edges": pl.Int64,
    "makespan_ns": pl.Int64,
    "floor_only_ns": pl.Int64,
    "floor_only_pct": pl.Float64,
    "latest_ns": pl.Int64,
    "residual_ns": pl.Int64,
    "residual_pct": pl.Float64,
    "device_starts": pl.Int64,
    "explained_pct": pl.Float64,
    "chance_pct": pl.Float64,
    "chance_back_pct": pl.Float64,
    "ambiguous_pct": pl.Float64,
    "dropped_edges": pl.String,
    "lost_waits": pl.Int64,
    "inferred_waits": pl.Int64,
    "turns": pl.Int64,
    "matched_communications": pl.Int64,
    "local_communications": pl.Int64,
    "threads_aside": pl.Int64,
}
_SUMS = (
    "lost_waits",
    "inferred_waits",
    "turns",
    "matched_communications",
    "local_communications",
    "threads_aside",
)


def analyze(job: Job) -> pl.DataFrame:
    found = build_dependencies(job)
    graph = found.graph
    fits = quality.measure_fits(graph, job.ranks)
    rows = []
    for rank in job.ranks:
        fit, counts = fits[rank], found.counts[rank]
        seen = quality.measure_explained_starts(graph, job[rank], rank)
        why_not = quality.explain_misfit(seen, fit.makespan, fit.residual)
        shares = (seen.share, seen.by_chance[0], seen.by_chance[2], seen.ambiguous)
        rows.append(
            {
                "rank": rank,
                "explainable": why_not is None,
                "why_not": why_not,
                **_figures(fit),
                "device_starts": seen.starts,
                **dict(
                    zip(
                        ("explained_pct", "chance_pct", "chance_back_pct", "ambiguous_pct"),
                        (100 * share if seen.starts else None for share in shares),
                        strict=True,
                    )
                ),
                **{name: counts[name] for name in _SUMS if name != "turns"},
                "turns": counts["handoffs"] + counts["completion_waits"],
            }
        )
    table = pl.DataFrame(rows, infer_schema_length=None)
    together = sum(fits[rank].makespan for rank in job.ranks)
    whole = {
        "rank": None,
        "explainable": bool(table["explainable"].all()),
        "why_not": _first(table),
        **_figures(fits[None]),
        "residual_pct": 100 * fits[None].residual / together if together else None,
        "device_starts": table["device_starts"].sum(),
        "dropped_edges": ", ".join(
            f"{EdgeKind(kind).label} {count}" for kind, count in enumerate(graph.dropped) if count
        )
        or None,
        **{name: table[name].sum() for name in _SUMS},
    }
    return conform_columns(
        pl.concat([table, pl.DataFrame([whole], infer_schema_length=None)], how="diagonal_relaxed"), COLUMNS
    )


def _figures(fit: quality.LatencyFit) -> dict[str, float | None]:
    def share(part: int) -> float | None:
        return 100 * part / fit.makespan if fit.makespan else None

    return {
        "points": fit.points,
        "edges": fit.edges,
        "makespan_ns": fit.makespan,
        "floor_only_ns": -fit.shortfall,
        "floor_only_pct": share(-fit.shortfall),
        "latest_ns": fit.latest,
        "residual_ns": fit.residual,
        "residual_pct": share(fit.residual),
    }


def _first(table: pl.DataFrame) -> str | None:
    """Why the first rank that is not explained is not."""
    bad = table.filter(~pl.col("explainable"))
    return None if not bad.height else f"rank {bad['rank'][0]}: {bad['why_not'][0]}"
