"""Causes of lost time with their cost and advice, ranked by what the job would gain.

One row per cause, for the rank with the highest cost (of stragglers: without which the job gains most), out of
``ranks`` affected ranks. Costs and gains of different causes may cover the same time (a gap, and the communication
after it), so they do not add up. A rank with several devices is idle when all of them are.

- job_gain_ns: upper bound of the time that the job would save without the problem on all affected ranks, simulated on
  the dependency graph of all ranks, from the start of the first annotated step (else of the recording). step_gain_ns:
  per annotated step. job_gain_pct: share of that time. All are null for what may exist in the recording only, which
  comes last, and if the graph does not explain the recording (see graph-quality) or the run is too large; the order is
  then that of the costs per step, then of the costs.
- cost_ns: upper bound of the time that the rank itself would save; concurrent losses of several streams or threads are
  counted once. pct: share of the time from the rank's first to its last event. step_cost_ns: per annotated step.
  step_pct: the part of the cost inside annotated steps (on the host), as share of their time. Both are null if no step
  is annotated, or if at least nine tenths of the work launched in the steps run after them.
- confidence: high (measured), medium (measured, but part of it is unavoidable), low (estimated).
- parts: the cost by place (an operator, a module, a kind of copy) as JSON text, a list of objects with place, cost_ns
  and count, largest first; null if there is one place. Of stragglers: by rank that is late itself (not because it
  waited for another), with job_gain_ns, what the job gains without the lateness of that rank alone.
- step: the step with the highest cost, out of ``count`` occurrences. operator, module: the innermost ones around the
  occurrence. frame: Python source line, if stacks were recorded. name: of the kernel or call. event: the host event to
  look at, on this rank. start_ns, end_ns: the time of the costliest occurrence, on the clock of this rank.
- title describes the problem, advice the remedy. pattern names the rule, which its module in
  etloom.analyses.findings.patterns describes.

Units: ns, percent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any

import polars as pl

from etloom.analyses.findings.finding import MAX_PLACES, Finding, Part
from etloom.analyses.findings.job_gain import JobGains
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.findings.rank_findings import find_in_rank, measure_rank
from etloom.analyses.helpers import check_percentage, conform_columns
from etloom.core import registry
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.intervals import EMPTY
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import explain_missing_times

SCOPE = "job"
DEFAULT_MIN_PCT = 0.5
MIN_SHOWN_PCT = 0.05
"""Smallest known gain of the job, in percent, with which a finding is listed."""
EMPTY_MESSAGE = (
    f"no finding costs the job or a rank at least --min-pct of its time (default {DEFAULT_MIN_PCT:g} %); checked: all "
    f"{len(registry.list_plugins('patterns'))} patterns, or that of --pattern; --min-pct 0 shows all findings"
)
COLUMNS = {
    "pattern": pl.String,
    "job_gain_ns": pl.Int64,
    "step_gain_ns": pl.Int64,
    "job_gain_pct": pl.Float64,
    "rank": pl.Int64,
    "ranks": pl.Int64,
    "cost_ns": pl.Int64,
    "pct": pl.Float64,
    "step_cost_ns": pl.Int64,
    "step_pct": pl.Float64,
    "confidence": pl.String,
    "title": pl.String,
    "advice": pl.String,
    "parts": pl.String,
    "count": pl.Int64,
    "step": pl.Int64,
    "stream": pl.Int64,
    "operator": pl.String,
    "module": pl.String,
    "frame": pl.String,
    "name": pl.String,
    "event": pl.Int64,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}
MIN_EXPLAINED = 0.7
"""A finding on a late rank comes before the lateness, as its cause, if it promises at least this share of its gain."""
MAX_SIMULATED = 32
"""Causes whose gain is simulated, those with the highest cost: each takes a pass over the graph."""
RankedFindings = list[tuple[int, Finding]]


def check_rank(trace: Trace) -> AnalysisError | None:
    """Return an error that explains why the rank has no times and is left out of a job's findings; None if it has
    times."""
    return None if trace.has_result(find_in_rank) else explain_missing_times(trace)


def analyze(
    job: Job,
    *,
    pattern: Annotated[str | None, "Only this pattern."] = None,
    min_pct: Annotated[
        float,
        "Hide findings that cost the job, or the rank, less than this share of the time, and unless it "
        "is 0 also those without which the job would not be faster (by less than 0.05 %).",
    ] = DEFAULT_MIN_PCT,
) -> pl.DataFrame:
    patterns = registry.list_plugins("patterns")
    check_percentage(min_pct, "min_pct")
    if pattern is not None and pattern.replace("_", "-") not in patterns:
        raise UnknownName("pattern", pattern, patterns, option="pattern")
    views, gains = JobView(job), JobGains(job)
    causes: dict[tuple[str, str | None], RankedFindings] = {}
    sizes = {}
    for name, rank, finding in _find_all(patterns if pattern is None else [pattern], views):
        if gains.is_too_large:  # only simulations need the times, which would fill the memory
            finding = dataclasses.replace(finding, lost=EMPTY, components=())
        causes.setdefault((name, finding.kind), []).append((rank, finding))
        if rank not in sizes:
            sizes[rank] = views[rank].compute_once(measure_rank).row(0, named=True)
    rows = [_describe_costliest(name, findings, sizes) for (name, _), findings in causes.items()]
    by_cost = sorted(zip(rows, causes.values(), strict=True), key=lambda pair: -pair[0]["cost_ns"])
    splitting = {name for name in patterns if getattr(registry.get("patterns", name), "SPLIT_BY_RANK", False)}
    artifacts = [all(finding.is_artifact for _, finding in findings) for _, findings in by_cost]
    promising = [pair for pair, is_artifact in zip(by_cost, artifacts, strict=True) if not is_artifact]
    for row, findings in promising[:MAX_SIMULATED]:
        module = registry.get("patterns", row["pattern"])
        limit = gains.transfer_gain if getattr(module, "LIMITED_BY_TRANSFERS", False) else None
        row |= _simulate_gain(gains, findings, row["step_count"], limit)
        if row["pattern"] in splitting and len(findings) > 1:
            row |= _split_by_rank(row["pattern"], gains, findings, sizes)
    late_rows = [row for row, _ in promising if row["pattern"] in splitting and len(views) > 1]
    for (row, findings), is_artifact in zip(by_cost, artifacts, strict=True):
        row["order"], row["is_artifact"] = row.get("job_gain_ns"), is_artifact
        if row["pattern"] not in splitting:
            orders = [_compute_order(row, findings, late_row, list(views)) for late_row in late_rows]
            row["order"] = max(filter(None, orders), default=row["order"])
    table = pl.DataFrame(
        [row for row, _ in by_cost],
        schema={**COLUMNS, "step_count": pl.Int64, "order": pl.Int64, "is_artifact": pl.Boolean},
        infer_schema_length=None,
    )
    return conform_columns(_rank_causes(table, min_pct), COLUMNS)


def _rank_causes(table: pl.DataFrame, min_pct: float) -> pl.DataFrame:
    """Return the causes that cost, or promise, at least ``min_pct`` percent, by what they promise; what may exist in
    the recording only comes last, and promises nothing."""
    relevant = table.filter((pl.col("pct") >= min_pct) | (pl.col("job_gain_pct") >= min_pct))
    if min_pct > 0:  # a known gain that would be shown as 0.0 % is not worth a line, whatever a rank loses
        relevant = relevant.filter(
            pl.col("job_gain_pct").is_null() | (pl.col("job_gain_pct") >= MIN_SHOWN_PCT)
        )
    return relevant.sort(
        *("is_artifact", "order", "job_gain_ns", "step_cost_ns", "cost_ns", "rank", "pattern"),
        descending=(False, True, True, True, True, False, False),
        nulls_last=True,
        maintain_order=True,
    )


def _compute_order(
    row: dict[str, Any], findings: RankedFindings, late_row: dict[str, Any], ranks: Sequence[int]
) -> int | None:
    """Return the gain (ns) by which a finding is sorted; raised above the gain of a late rank whose lateness the
    finding explains.

    A late rank is a symptom. A finding is the cause, and comes before the late rank, if it mostly costs this rank
    (compared with the median of the others) and explains at least `MIN_EXPLAINED` of the job's loss by the lateness.

    Args:
        late_row: The row of the finding on late ranks, for the rank without whose lateness the job gains most.
        ranks: All ranks of the job.
    """
    gain: int | None = row.get("job_gain_ns")
    late_gain: int = late_row.get("job_gain_ns") or 0
    if gain is None or gain <= MIN_EXPLAINED * late_gain or row["confidence"] == "low":
        return gain
    costs = {rank: finding.cost_ns for rank, finding in findings}
    others = sorted(costs.get(rank, 0) for rank in ranks if rank != late_row["rank"])
    of_late = costs.get(late_row["rank"], 0)
    return max(gain, late_gain + 1) if of_late > 2 * others[(len(others) - 1) // 2] else gain


def _describe_costliest(
    name: str, findings: RankedFindings, sizes: dict[int, dict[str, int]]
) -> dict[str, Any]:
    """Return the table row of a cause of lost time, for the rank with the highest cost, without the columns on the
    job's gain."""
    rank, finding = max(findings, key=lambda pair: (pair[1].cost_ns, -pair[0]))
    return _describe(name, rank, finding, sizes[rank]) | {"ranks": len({rank for rank, _ in findings})}


def _describe(name: str, rank: int, finding: Finding, size: dict[str, int]) -> dict[str, Any]:
    """Return a rank's finding as a row of the result table, without the columns on the job's gain."""
    columns = {field: getattr(finding, field) for field in COLUMNS if hasattr(finding, field)}
    return {
        **columns,
        "pattern": name,
        "rank": rank,
        "pct": _percent(finding.cost_ns, size["span"]),
        "step_pct": _percent(finding.in_steps_ns, size["in_steps"]),
        "step_cost_ns": finding.in_steps_ns // size["step_count"] if size["step_count"] else None,
        "step_count": size["step_count"],
        "parts": _format_parts(finding.parts),
    }


def _simulate_gain(
    gains: JobGains, findings: RankedFindings, step_count: int, limit_ns: int | None
) -> dict[str, Any]:
    """Simulate the job without the losses of findings; return the columns on its gain in time, which is limited to
    ``limit_ns``."""
    gain_ns = gains.compute_gain(findings)
    if gain_ns is None or gains.duration_ns is None:
        return {}
    if limit_ns is not None:
        gain_ns = min(gain_ns, limit_ns)
    return {
        "job_gain_ns": gain_ns,
        "step_gain_ns": gain_ns // step_count if step_count else None,
        "job_gain_pct": _percent(gain_ns, gains.duration_ns),
    }


def _split_by_rank(
    name: str, gains: JobGains, findings: RankedFindings, sizes: dict[int, dict[str, int]]
) -> dict[str, Any]:
    """Return the table row of the rank without whose finding the job gains most; its column ``parts`` lists gain and
    cost by rank."""
    by_cost = sorted(findings, key=lambda pair: (-pair[1].cost_ns, pair[0]))
    alone = [(gains.compute_gain([pair]), *pair) for pair in by_cost[:MAX_PLACES]]
    alone.sort(key=lambda row: -(row[0] or 0))
    parts = [Part(f"rank {rank}", finding.cost_ns, finding.count, gain) for gain, rank, finding in alone]
    if rest := by_cost[MAX_PLACES:]:
        cost, count = (sum(getattr(finding, field) for _, finding in rest) for field in ("cost_ns", "count"))
        parts.append(Part(f"{len(rest):,} more", cost, count, gains.compute_gain(rest)))
    _, rank, finding = alone[0]
    # Without a gain of their own, other ranks are late for the same reason, or nobody waits for them.
    others = sum(1 for gain, _, _ in alone[1:] if gain is None or gain > 0)
    others += len(by_cost[MAX_PLACES:]) if rest and parts[-1].job_gain_ns != 0 else 0
    title = finding.title + registry.get("patterns", name).describe_others(others)
    return _describe(name, rank, finding, sizes[rank]) | {"title": title, "parts": _format_parts(parts)}


def _format_parts(parts: Sequence[Part]) -> str | None:
    """Return the parts of a finding's cost (per place or rank) as JSON text; job_gain_ns is omitted where it is
    unknown."""
    rows = [dataclasses.asdict(part) for part in parts]
    for row in rows:
        del row["more"]
        if row["job_gain_ns"] is None:
            del row["job_gain_ns"]
    return json.dumps(rows, ensure_ascii=False) if rows else None


def _percent(part: int, total: int) -> float | None:
    return 100 * part / total if total else None


def _find_all(names: Collection[str], views: JobView) -> Iterator[tuple[str, int, Finding]]:
    """Yield the findings of the named patterns with their rank; all patterns of a rank run before the next rank is
    loaded."""
    patterns = {name: registry.get("patterns", name) for name in names}
    rank_patterns = [name for name, pattern in patterns.items() if pattern.SCOPE == "rank"]
    for rank in views:
        for name, findings in views[rank].map_patterns(views[rank].find, rank_patterns).items():
            for finding in findings:
                yield name, rank, finding
    for name, pattern in patterns.items():
        if name not in rank_patterns:
            for rank, finding in pattern.find(views):
                yield name, rank, views[rank].doubt(finding)
