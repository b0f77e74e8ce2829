"""Whether a run is slower than a baseline by more than a limit, beyond noise: what a CI job asks.

A measure has failed where all of its interval lies above the limit. It has passed where its change is not above the
limit and its interval is narrow enough that a change of twice the limit would have failed, or lies below the limit
whole. Else nothing can be told, and a gate that cannot tell does not pass: more steps or runs narrow the interval. One
run of hosts against one passes where their steps alone would have it pass; to fail, it must be slower by more than
such runs differ (`etloom.comparison.best_case.SINGLE_RUN_ERROR`).

Step time is judged by the quiet step (`etloom.comparison.best_case`) where that can be told. What the steps took then stands
in the table beside it and is judged only if it is asked for, as wall-step-time: on a machine that is shared, it follows
what else the machine does. Yet the quiet step does not pass against it where other work is no reason for longer steps,
since they are even, or where the quiet step holds much that was not measured at its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import Any

import polars as pl

from etloom.comparison.best_case import CONFIDENCE, MIN_STEPS, estimate_best_case_shift
from etloom.comparison.difference_tables import has_steps
from etloom.comparison.measures import MEASURES, compare_measure
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Job

STEP_TIME, WALL_STEP_TIME = "step-time", "wall-step-time"
METRICS = (STEP_TIME, WALL_STEP_TIME, *(name for name in MEASURES if name != STEP_TIME))
BEST_CASE = "quiet step time"
COLUMNS = {
    "measure": pl.String,
    "verdict": pl.String,
    "unit": pl.String,
    "before": pl.Float64,
    "after": pl.Float64,
    "change": pl.Float64,
    "change_pct": pl.Float64,
    "low_pct": pl.Float64,
    "high_pct": pl.Float64,
    "confidence_pct": pl.Float64,
    "limit_pct": pl.Float64,
    "values_before": pl.Int64,
    "values_after": pl.Int64,
    "more_steps": pl.Int64,
    "more_runs": pl.Int64,
}
MAX_EVEN_RATIO = 1.1
"""How many times its fastest step the median step of a run may take: other work on the machine comes and goes. Of runs
beside other work it took 1.9 to 7 times that."""
MAX_ADVISED = 10_000
"""Steps or runs: where more would be needed, that is no advice."""


def judge_regression(
    runs: Sequence[Job],
    baselines: Sequence[Job],
    max_regression: float,
    metrics: Sequence[str] = (STEP_TIME,),
) -> pl.DataFrame:
    """COLUMNS, a row a measure. verdict: passed, failed, undecided, or noted (not judged). change is change_pct of
    before, of which the verdict is (see `etloom.comparison.measures.compare_measure`).

    max_regression: percent. more_steps, more_runs: of each side, what an undecided measure would take; null where that
    is no way. Raises UnknownName for a metric that is not there, and AnalysisError for one that a side lacks.
    """
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(metrics):
        if name not in METRICS:
            raise UnknownName("metric", name, METRICS, option="metric")
        if name in (STEP_TIME, WALL_STEP_TIME) and not all(map(has_steps, (*baselines, *runs))):
            raise AnalysisError(
                "a run marks no steps, so there is no step time to judge",
                remedy="record it with etloom collect or torch.profiler's schedule, or judge another --metric",
            )
        if name == STEP_TIME and (found := estimate_best_case_shift(baselines, runs)):
            row = {
                "measure": BEST_CASE,
                "unit": "ns",
                "before": found.before,
                "after": found.after,
                "change": found.after - found.before,
                "change_pct": found.percent,
                "low_pct": found.low,
                "high_pct": found.high,
                "confidence_pct": 100 * CONFIDENCE,
                "values_before": found.steps_before,
                "values_after": found.steps_after,
            }
            quiet = _judge(row, max_regression, min(len(runs), len(baselines)), found.least)
            if found.alone and quiet["verdict"] == "undecided":
                low, high = found.alone
                seen = _judge({**row, "low_pct": low, "high_pct": high}, max_regression, 1, found.least)
                quiet |= {"verdict": "passed"} if _passed(seen) else {"more_steps": None, "more_runs": 2}
            wall = _compare_or_raise(runs, baselines, STEP_TIME)
            steady, even = _judge(wall, max_regression), found.uneven <= MAX_EVEN_RATIO
            if _passed(quiet) and steady["verdict"] == "failed" and (even or found.rare > max_regression):
                quiet["verdict"] = "undecided"
            if WALL_STEP_TIME in metrics:
                rows.append(quiet)
                continue
            may_pass = quiet["verdict"] == "undecided" and quiet["change_pct"] <= max_regression
            if even and may_pass and _passed(steady):
                # Steps so even need no more of them to tell.
                rows += [steady, {**quiet, "verdict": "noted", "more_steps": None, "more_runs": None}]
            else:
                rows += [quiet, {**wall, "verdict": "noted"}]
            continue
        measure = STEP_TIME if name == WALL_STEP_TIME else name
        rows.append(_judge(_compare_or_raise(runs, baselines, measure), max_regression))
    return pl.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], schema=COLUMNS)


def _compare_or_raise(runs: Sequence[Job], baselines: Sequence[Job], measure: str) -> dict[str, Any]:
    row = compare_measure(baselines, runs, measure)
    if not row["values_before"] or not row["values_after"]:
        raise AnalysisError(
            f"the runs do not both tell of {MEASURES[measure][0]}",
            remedy="leave the measure out, or record it",
        )
    return row


def _judge(row: dict[str, Any], limit: float, runs: int = 1, least: float = 0.0) -> dict[str, Any]:
    """The row with verdict, limit_pct and what more it would take. least: half the width that no step takes away."""
    change, low, high = row["change_pct"], row["low_pct"], row["high_pct"]
    row = {**row, "limit_pct": limit}
    if row.get("negligible"):
        return {**row, "verdict": "passed"}
    if change is None:  # next to nothing before: what is there now is new
        return {**row, "verdict": "failed"}
    if low is None:
        fewest = min(row["values_before"], row["values_after"])
        return {**row, "verdict": "undecided", "more_steps": max(1, MIN_STEPS - fewest)}
    if low > limit:
        return {**row, "verdict": "failed"}
    width = (high - low) / 2
    if high <= limit or (change <= limit and width <= limit):
        return {**row, "verdict": "passed"}
    target = abs(change - limit) if change > limit else limit
    steps = min(row["values_before"], row["values_after"]) / runs
    more = steps * ((width**2 - least**2) / (target**2 - least**2) - 1) if target > least else inf
    others = ceil(runs * (width / target) ** 2) - runs if target > 0 else inf
    return {
        **row,
        "verdict": "undecided",
        "more_steps": max(1, ceil(more)) if more < MAX_ADVISED else None,
        "more_runs": max(1, int(others)) if others < MAX_ADVISED else None,
    }


def _passed(row: dict[str, Any]) -> bool:
    return bool(row["verdict"] == "passed")


def explain_row(table: pl.DataFrame, row: int) -> list[str]:
    """What is to be said of a row of `gate`'s table, if more than that it passed."""
    line = _explanation(table.row(row, named=True), table)
    return [line] if line else []


def _explanation(row: dict[str, Any], table: pl.DataFrame) -> str | None:
    if row["verdict"] == "passed":
        return None
    name = row["measure"]
    if row["change_pct"] is None:
        return f"{name}: next to nothing in the baseline, now {_format_value(row['after'], row['unit'])}"
    change = f"{row['change_pct']:+.1f} %"
    if row["low_pct"] is not None:
        interval = f"{row['confidence_pct']:.0f} % interval {row['low_pct']:+.1f} to {row['high_pct']:+.1f} %"
        change = f"{change} ({interval})"
    if row["verdict"] == "failed":
        return f"{name}: {change}, more than the {row['limit_pct']:g} % allowed"
    if row["verdict"] == "noted":
        return None if name == BEST_CASE else _explain_wall_step_time(row, change, table)
    needs = [
        f"{row[column]:,} more {what}{'' if row[column] == 1 else 's'} on each side"
        for column, what in (("more_steps", "step"), ("more_runs", "run"))
        if row[column] is not None
    ]
    advice = (
        f"needs about {' or '.join(needs)}" if needs else "it lies at the limit, or the noise is too great"
    )
    if name == BEST_CASE and _passed(_judge(row, row["limit_pct"])):
        advice = f"the steps took longer than that, and their pieces do not show why; --metric {WALL_STEP_TIME} judges it"
    return f"{name}: cannot tell, {change} against {row['limit_pct']:g} % allowed; {advice}"


def _format_value(value: float, unit: str) -> str:
    return f"{value / 1e6:,.2f} {'ms' if unit == 'ns' else 'MB'}"


def _explain_wall_step_time(row: dict[str, Any], change: str, table: pl.DataFrame) -> str | None:
    """What there is to say of step time where the quiet step is judged: that it is longer, and the quiet one is not."""
    quiet = table.row(by_predicate=pl.col("measure") == BEST_CASE, named=True)
    if quiet["verdict"] == "failed" or row["low_pct"] is None or row["low_pct"] <= quiet["limit_pct"]:
        return None
    if quiet["verdict"] == "passed":
        why = "but not at its quietest: the machine did other work, or something is slow now and then;"
        return f"{row['measure']}: {change}, {why} --metric {WALL_STEP_TIME} judges it"
    return (
        f"{row['measure']}: {change}; where the machine did nothing else, --metric {WALL_STEP_TIME} judges it"
    )
