"""What costs time and what to do about it: every anti-pattern that is found, ranked by its cost.

A row is a place where a pattern costs time: on the rank where it costs most, of the ``ranks`` on which it does. The
costs of different patterns can be of the same time (a gap, and the communication behind it), so they do not add up. A
rank with several devices stands still when all of them do.

- cost_ns: what the rank would gain at most if it did not happen, what several streams or threads lose at once counted
  once; pct: of the time from its first to its last event; step_pct: the part of it that lies in the time of marked
  steps on the host (of a gap that begins before the first step, what is left of it in the step), of all that time; null
  where no step is marked.
- confidence: high (measured), medium (measured, but part of it would stay), low (estimated).
- step: where it costs most, of the ``count`` times. operator, module: innermost around it. frame: line of Python,
  where stacks were recorded. name: of the kernel or call. event: the host
  event to look at, of the rank.
- title says what happens, advice what to do. pattern names the rule: its module in etloom.analyses.findings.patterns says what it looks
  for.

pattern: only this one. min_pct: leave out what costs less.

Units: ns, percent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import polars as pl

from etloom.analyses.findings.patterns import Finding, Views
from etloom.analyses.helpers import conform_columns
from etloom.core import registry
from etloom.core.errors import UnknownName
from etloom.core.trace import Job

SCOPE = "job"
LEAST_PCT = 0.5
NOTHING = (
    f"none of the patterns looked for (all {len(registry.list_plugins('patterns'))}, or --pattern) costs a rank as much of "
    f"its time as --min-pct says ({LEAST_PCT:g} % unless it is given); --min-pct 0 shows all that is found"
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


def analyze(job: Job, *, pattern: str | None = None, min_pct: float = LEAST_PCT) -> pl.DataFrame:
    known = registry.list_plugins("patterns")
    if pattern is not None and pattern.replace("_", "-") not in known:
        raise UnknownName("pattern", pattern, known, option="pattern")
    views = Views(job)
    rows = [
        {
            "pattern": name,
            "rank": rank,
            "pct": _percent(finding.cost_ns, views[rank].span_ns),
            "step_pct": _percent(finding.in_steps_ns, views[rank].stepped.total),
            **dataclasses.asdict(finding),
        }
        for name, rank, finding in _found(known if pattern is None else [pattern], views)
    ]
    table = pl.DataFrame(
        rows, schema={**COLUMNS, "in_steps_ns": pl.Int64, "place": pl.String}, infer_schema_length=None
    )
    worst = table.filter(pl.col("pct") >= min_pct).sort(
        "cost_ns", "rank", "pattern", descending=(True, False, False), maintain_order=True
    )
    everywhere = worst.group_by("pattern", "place", maintain_order=True).agg(
        pl.exclude("ranks").first(), pl.col("rank").n_unique().alias("ranks")
    )
    return conform_columns(everywhere, COLUMNS)


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _found(names: Collection[str], views: Views) -> Iterator[tuple[str, int, Finding]]:
    """What these patterns find: a rank is put to all that look at one before the next rank is."""
    patterns = {name: registry.get("patterns", name) for name in names}
    alone = {name: pattern for name, pattern in patterns.items() if pattern.SCOPE == "rank"}
    for rank in views:
        for name, pattern in alone.items():
            for finding in pattern.find(views[rank]):
                yield name, rank, finding
    for name, pattern in patterns.items():
        if name not in alone:
            for rank, finding in pattern.find(views):
                yield name, rank, finding
