"""How far the dependency graph explains each rank, and why not; to read before critical-path or a simulation.

A row is a rank, and with a null rank the whole job. explainable: whether what the graph predicts is worth
reading, else ``why_not``: a sampled trace, one of few kernels, or one whose delays have no cause in it.

- floor_only: how much shorter the makespan is if nothing takes longer than what it needs at least; latest is
  the same for the point that falls short most. residual: the sum of all delays that nothing explains; of the whole
  job residual_pct is of the makespans of its ranks together.
- device_starts: kernels, copies and sets. explained: the share of them that start within 5 us of the end of
  what their stream did or waited for, or between the start of their launch call and 5 us after its end, or
  while the stream's last work still ran. chance: the same with all starts moved by 23 us, the level to compare
  with; chance_back: by -17 us, which is high where launch calls are long. ambiguous: explained by both.
- dropped_edges: dependencies that contradict the recorded times, by kind. lost_waits: synchronisations that fit
  no work. inferred_waits: not recorded but told from calls and times. turns: threads that were seen to work in
  turns, or to wait for an asynchronous call. matched and local: communications that met other ranks', or did
  not. threads_aside: threads left out since they only poll, or only run Python.

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
