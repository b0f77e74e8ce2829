"""Performance problems with their cost and advice, ranked by cost.

One row per pattern and place where it costs time, for the rank with the highest cost, out of ``ranks`` affected ranks.
Costs of different patterns may cover the same time (a gap, and the communication after it), so they do not add up. A
rank with several devices is idle when all of them are.

- cost_ns: upper bound of the time the rank would save without the problem; concurrent losses of several streams or
  threads are counted once. pct: share of the time from the rank's first to its last event. step_pct: the part of the
  cost inside annotated steps (on the host; a gap that starts before the first step counts from the start of the step),
  as share of their time; null if no step is annotated.
- confidence: high (measured), medium (measured, but part of it is unavoidable), low (estimated).
- step: the step with the highest cost, out of ``count`` occurrences. operator, module: the innermost ones around the
  occurrence. frame: Python source line, if stacks were recorded. name: of the kernel or call. event: the host event to
  look at, on this rank.
- title describes the problem, advice the remedy. pattern names the rule, which its module in
  etloom.analyses.findings.patterns describes.

pattern: only this pattern. min_pct: hide findings that cost less than this share of the time.

Units: ns, percent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.helpers import conform_columns
from etloom.core import registry
from etloom.core.errors import UnknownName
from etloom.core.trace import Job

SCOPE = "job"
DEFAULT_MIN_PCT = 0.5
EMPTY_MESSAGE = (
    f"no finding costs a rank at least --min-pct of its time (default {DEFAULT_MIN_PCT:g} %); checked: all "
    f"{len(registry.list_plugins('patterns'))} patterns, or --pattern; --min-pct 0 shows all findings"
)
COLUMNS = {
    "pattern": pl.String,
    "rank": pl.Int64,
    "ranks": pl.Int64,
    "cost_ns": pl.Int64,
    "pct": pl.Float64,
    "step_pct": pl.Float64,
    "confidence": pl.String,
    "title": pl.String,
    "advice": pl.String,
    "count": pl.Int64,
    "step": pl.Int64,
    "stream": pl.Int64,
    "operator": pl.String,
    "module": pl.String,
    "frame": pl.String,
    "name": pl.String,
    "event": pl.Int64,
}


def analyze(job: Job, *, pattern: str | None = None, min_pct: float = DEFAULT_MIN_PCT) -> pl.DataFrame:
    patterns = registry.list_plugins("patterns")
    if pattern is not None and pattern.replace("_", "-") not in patterns:
        raise UnknownName("pattern", pattern, patterns, option="pattern")
    views = JobView(job)
    rows = [
        {
            "pattern": name,
            "rank": rank,
            "pct": _percent(finding.cost_ns, views[rank].span_ns),
            "step_pct": _percent(finding.in_steps_ns, views[rank].step_intervals.total),
            **dataclasses.asdict(finding),
        }
        for name, rank, finding in _find_all(patterns if pattern is None else [pattern], views)
    ]
    table = pl.DataFrame(
        rows, schema={**COLUMNS, "in_steps_ns": pl.Int64, "place": pl.String}, infer_schema_length=None
    )
    costliest = table.filter(pl.col("pct") >= min_pct).sort(
        "cost_ns", "rank", "pattern", descending=(True, False, False), maintain_order=True
    )
    merged = costliest.group_by("pattern", "place", maintain_order=True).agg(
        pl.exclude("ranks").first(), pl.col("rank").n_unique().alias("ranks")
    )
    return conform_columns(merged, COLUMNS)


def _percent(part: int, total: int) -> float | None:
    return 100 * part / total if total else None


def _find_all(names: Collection[str], views: JobView) -> Iterator[tuple[str, int, Finding]]:
    """Yield the findings of these patterns; all patterns of one rank run before the next rank is loaded."""
    patterns = {name: registry.get("patterns", name) for name in names}
    rank_patterns = {name: pattern for name, pattern in patterns.items() if pattern.SCOPE == "rank"}
    for rank in views:
        for name, pattern in rank_patterns.items():
            for finding in pattern.find(views[rank]):
                yield name, rank, finding
    for name, pattern in patterns.items():
        if name not in rank_patterns:
            for rank, finding in pattern.find(views):
                yield name, rank, finding
