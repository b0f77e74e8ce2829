"""Compute the findings that need only a single rank's trace, while that trace is in memory."""

from __future__ import annotations

import polars as pl

from etloom.analyses.findings.finding import Finding
from etloom.analyses.findings.rank_view import RankFindings, RankView, find_table_key
from etloom.core import registry
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace


class _NeedsOtherRanks(Exception):
    """Raised when a pattern needs data of other ranks."""


def find_in_rank(trace: Trace) -> RankFindings:
    """Return the findings of patterns that need a single rank only, and the tables of the rank that job-wide patterns
    need.

    Raises:
        AnalysisError: the trace has neither GPU activity nor operators.
    """
    view = RankView(trace, _refuse, _refuse)
    patterns = {name: registry.get("patterns", name) for name in registry.list_plugins("patterns")}

    def find(name: str) -> list[Finding] | None:
        try:
            return view.apply(patterns[name])
        except _NeedsOtherRanks:
            return None

    results = view.map_patterns(find, [name for name in patterns if patterns[name].SCOPE == "rank"])
    findings = {name: found for name, found in results.items() if found is not None}
    functions = [
        measure_rank,
        *(function for pattern in patterns.values() for function in getattr(pattern, "RANK_TABLES", ())),
    ]
    functions_by_key = {find_table_key(function): function for function in functions}
    tables = {
        key: view.compute_once(function) for key, function in functions_by_key.items() if key is not None
    }
    return RankFindings(findings, tables)


def _refuse() -> Intervals:
    raise _NeedsOtherRanks


def measure_rank(view: RankView) -> pl.DataFrame:
    """Return a row on the size of a rank: time from the first to the last event (ns), time in steps (ns), number of
    steps.

    The time in steps and the number of steps are 0 if the steps do not cover the work.
    """
    step_count = view.steps.height if view.steps_cover_work else 0
    return pl.DataFrame(
        {
            "span": view.span_ns,
            "in_steps": view.step_intervals.total if step_count else 0,
            "step_count": step_count,
        }
    )
