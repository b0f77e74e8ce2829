"""What a run comes to: a few sentences with numbers, and the tables they were taken from.

The HTML report and the terminal summary show the same Verdict. A question that a rank cannot answer (no steps, no
device work) leaves the rank out of that table and is named in ``unanswered``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import polars as pl

from etloom.analyses.answers import answer_by_rank
from etloom.core import registry
from etloom.core.errors import AnalysisError
from etloom.core.text import format_ranks
from etloom.core.trace import Job
from etloom.linker.placement import SEVERAL_DEVICES
from etloom.reports import summary_lines, untimed_summary
from etloom.reports.summary_line import SummaryLine

ANALYSES = ("steps", "temporal-breakdown", "comm-overlap", "top-ops", "kernel-breakdown", "link-quality")
JOB_ANALYSES = (
    "findings",
    "critical-path",
    "collective-summary",
    "collectives",
    "stragglers",
    "clocks",
    "imbalance",
)
"""Analyses of all ranks together."""
ANALYSIS_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "critical-path": {"by": "edge"},
    "top-ops": {"top": 10**9},  # what is first over all ranks may be further down on one
}
MAX_OPERATORS = 20
"""Operators of a rank that are listed, those of most own time."""
MAX_GRAPH_EVENTS = 8_000_000
"""Of a larger run the critical path is left to `etloom analyze critical-path`, for the memory that its graph takes."""
PART_LABELS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "exposed_memory": "exposed memory",
    "exposed_other": "exposed other",
    "idle": "idle",
}
"""Parts of temporal-breakdown, which sum to the span, as they are called in text."""


@dataclass(frozen=True)
class RunSummary:
    """``tables``: by analysis, ``rank`` first; ``overview``, a row a rank (see `_overview`); and of a run without times
    ``recorded``, its operators."""

    ranks: tuple[int, ...]
    sentences: tuple[SummaryLine, ...]
    tables: Mapping[str, pl.DataFrame]
    stats: pl.DataFrame
    basis: str  # "device" | "host" | "mixed" | "none": what the breakdown is of
    unanswered: Mapping[str, str] = field(default_factory=dict)  # analysis -> why some rank has no answer


def summarize_run(job: Job) -> RunSummary:
    """The verdict on a run whose traces are linked."""
    return job.compute_once(_compute_summary)


def _compute_summary(job: Job) -> RunSummary:
    tables, unanswered = _analyze_ranks(job)
    operators = tables["top-ops"]
    tables["top-ops"] = operators.group_by("rank", maintain_order=True).head(MAX_OPERATORS)
    for name in JOB_ANALYSES:
        tables[name], reason = _analyze_job(job, name)
        if reason:
            unanswered[name] = reason
    tables["overview"] = overview = _build_overview(job, tables)
    stats = job.stats
    bases = overview["basis"].drop_nulls().unique().to_list()
    basis = bases[0] if len(bases) == 1 else "mixed" if bases else "none"
    if untimed_summary.is_untimed(job):
        told = (
            *untimed_summary.summarize_untimed_run(job),
            summary_lines.summarize_data_loss(stats),
            summary_lines.summarize_size(job),
        )
        return RunSummary(
            tuple(job.ranks),
            told,
            {**tables, "recorded": untimed_summary.count_recorded_operators(job)},
            stats,
            basis,
        )
    devices = dict(stats.filter(pl.col("name") == SEVERAL_DEVICES).select("rank", "count").iter_rows())
    sentences = (
        summary_lines.summarize_top_finding(tables["findings"]),
        summary_lines.summarize_step_time(tables["steps"]),
        *summary_lines.summarize_time_shares(
            tables["temporal-breakdown"], tables["comm-overlap"], basis, devices
        ),
        summary_lines.summarize_critical_path(tables["critical-path"], unanswered.get("critical-path")),
        summary_lines.summarize_top_operator(operators),
        summary_lines.summarize_links(tables["link-quality"]),
        summary_lines.summarize_data_loss(stats),
        summary_lines.summarize_size(job),
    )
    return RunSummary(tuple(job.ranks), sentences, tables, stats, basis, unanswered)


def _analyze_ranks(job: Job) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    """Return the tables of the analyses of ranks, and for each analysis why some ranks have no answer."""
    analyses = {name: registry.get("analyses", name) for name in ANALYSES}
    answers = answer_by_rank(
        job,
        {
            name: partial(analysis.analyze, **ANALYSIS_OPTIONS.get(name, {}))
            for name, analysis in analyses.items()
        },
    )
    tables: dict[str, pl.DataFrame] = {}
    reasons: dict[str, str] = {}
    for name, answer in answers.items():
        empty = pl.DataFrame(schema={"rank": pl.Int64, **analyses[name].COLUMNS})
        tables[name] = answer.table if answer.table.width else empty
        if answer.refused:
            first = next(iter(answer.refused.values()))
            reasons[name] = f"{first.what} ({format_ranks(answer.refused)})"
    return tables, reasons


def _analyze_job(job: Job, name: str) -> tuple[pl.DataFrame, str | None]:
    """The answer of the job; no reason is given where one rank alone was asked to be compared."""
    analysis = registry.get("analyses", name)
    nothing = pl.DataFrame(schema=analysis.COLUMNS)
    if name == "critical-path" and sum(trace.rows("events") for trace in job.values()) > MAX_GRAPH_EVENTS:
        return nothing, f"more than {MAX_GRAPH_EVENTS:,} events: ask `etloom analyze critical-path`"
    try:
        return analysis.analyze(job, **ANALYSIS_OPTIONS.get(name, {})), None
    except AnalysisError as error:
        return nothing, error.what if len(job) > 1 and name in ("stragglers", "clocks") else None


def _build_overview(job: Job, tables: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """rank, basis, steps, step_mean_ns, step_std_ns, span_ns, <part>_pct of the span, overlap_pct."""
    dur = pl.col("dur_ns")
    steps = (
        tables["steps"]
        .group_by("rank")
        .agg(pl.len().alias("steps"), dur.mean().alias("step_mean_ns"), dur.std().alias("step_std_ns"))
    )
    whole = pl.col("step").is_null()
    time = tables["temporal-breakdown"].filter(whole)
    overlap = tables["comm-overlap"].filter(whole).select("rank", "overlap_pct")
    return (
        pl.DataFrame({"rank": list(job)}, schema={"rank": pl.Int64})
        .join(steps, on="rank", how="left", maintain_order="left")
        .join(time, on="rank", how="left", maintain_order="left")
        .join(overlap, on="rank", how="left", maintain_order="left")
        .select(
            "rank",
            "basis",
            pl.col("steps").fill_null(0).cast(pl.Int64),
            "step_mean_ns",
            "step_std_ns",
            "span_ns",
            *(f"{part}_pct" for part in PART_LABELS),
            "overlap_pct",
        )
    )
