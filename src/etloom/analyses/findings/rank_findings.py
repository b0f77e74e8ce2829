"""Compute the findings that need only a single rank's trace, while that trace is in memory."""

from __future__ import annotations

import polars as pl

from etloom.analyses.findings.rank_view import RankFindings, RankView, find_table_key
from etloom.core import registry
from etloom.core.errors import EtloomError
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace


def find_in_rank(trace: Trace) -> RankFindings:
    """Return the findings of patterns that need a single rank only, and the rank's tables that other patterns need.

    Raises:
        AnalysisError: the trace has neither GPU activity nor operators.
        EtloomError: a pattern needs other ranks, and does not declare it.
    """
    view = RankView(trace, _refuse, _refuse)
    patterns = {name: registry.get("patterns", name) for name in registry.list_plugins("patterns")}
    names = [
        name
        for name, pattern in patterns.items()
        if pattern.SCOPE == "rank" and not getattr(pattern, "NEEDS_OTHER_RANKS", False)
    ]
    findings = view.map_patterns(lambda name: view.apply(patterns[name]), names)
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
    raise EtloomError("a pattern needs data of other ranks", remedy="declare it by NEEDS_OTHER_RANKS = True")


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
