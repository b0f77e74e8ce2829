"""Judge whether runs are slower than baselines by more than a limit, beyond noise, for use in CI jobs.

A measure fails if its whole interval is above the limit. It passes if its change is not above the limit and its
interval is narrow enough that a change of twice the limit would have failed, or if its whole interval is below the
limit. Otherwise it is undecided, which does not pass: more steps or runs narrow the interval. One host-only run against
one passes if their steps alone would pass; to fail, it must be slower by more than such runs differ
(`etloom.comparison.best_case.SINGLE_RUN_ERROR`).

Step time is judged by the best-case step (`etloom.comparison.best_case`) if it can be estimated. The recorded step time
is then noted in the table and judged only on request, as wall-step-time: on a shared machine it depends on other work.
However, if the recorded step time fails, the best-case step does not pass in two cases: the steps are even, so other
work is not the reason; or much of it comes from coarser kinds of segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import Any

import polars as pl

from etloom.comparison.best_case import CONFIDENCE, MIN_STEPS, estimate_best_case_shift
from etloom.comparison.measures import MEASURES, compare_measure
from etloom.comparison.run_tables import has_steps
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Job

STEP_TIME, WALL_STEP_TIME = "step-time", "wall-step-time"
METRICS = (STEP_TIME, WALL_STEP_TIME, *(name for name in MEASURES if name != STEP_TIME))
BEST_CASE = "best-case step time"
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
"""Maximum ratio of median and fastest step of a run with even steps; with other work on the machine, the ratio was 1.9
to 7."""
MAX_ADVISED = 10_000
"""Steps or runs: larger numbers are not advised."""


def judge_regression(
    runs: Sequence[Job],
    baselines: Sequence[Job],
    max_regression: float,
    metrics: Sequence[str] = (STEP_TIME,),
) -> pl.DataFrame:
    """Judge for each metric whether ``runs`` regressed against ``baselines`` by more than ``max_regression`` percent.

    Args:
        max_regression: allowed change, percent.
        metrics: measures to judge, of `METRICS`.

    Returns:
        One row per measure (`COLUMNS`). verdict: passed, failed, undecided, or noted (not judged). change: change_pct
        of before, on which the verdict is based (see `measures.compare_measure`). more_steps, more_runs: needed on each
        side to decide an undecided measure; null if that would not help.

    Raises:
        UnknownName: The metric does not exist.
        AnalysisError: a side lacks the measure.
    """
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(metrics):
        if name not in METRICS:
            raise UnknownName("metric", name, METRICS, option="metric")
        if name in (STEP_TIME, WALL_STEP_TIME) and not all(map(has_steps, (*baselines, *runs))):
            side = "the baseline" if all(map(has_steps, runs)) else "the judged run"
            raise AnalysisError(
                f"{side} has no step annotations: its step time is unknown",
                remedy="record it with etloom collect or torch.profiler's schedule, or judge another --metric",
            )
        if name == STEP_TIME and (estimate := estimate_best_case_shift(baselines, runs)):
            row = {
                "measure": BEST_CASE,
                "unit": "ns",
                "before": estimate.before,
                "after": estimate.after,
                "change": estimate.after - estimate.before,
                "change_pct": estimate.percent,
                "low_pct": estimate.low,
                "high_pct": estimate.high,
                "confidence_pct": 100 * CONFIDENCE,
                "values_before": estimate.steps_before,
                "values_after": estimate.steps_after,
            }
            best_case = _judge(row, max_regression, min(len(runs), len(baselines)), estimate.least)
            if estimate.alone and best_case["verdict"] == "undecided":
                low, high = estimate.alone
                steps_only = _judge(
                    {**row, "low_pct": low, "high_pct": high}, max_regression, 1, estimate.least
                )
                best_case |= (
                    {"verdict": "passed"} if _passed(steps_only) else {"more_steps": None, "more_runs": 2}
                )
            wall = _compare_or_raise(runs, baselines, STEP_TIME)
            steady, even = _judge(wall, max_regression), estimate.uneven <= MAX_EVEN_RATIO
            if (
                _passed(best_case)
                and steady["verdict"] == "failed"
                and (even or estimate.rare > max_regression)
            ):
                best_case["verdict"] = "undecided"
            if WALL_STEP_TIME in metrics:
                rows.append(best_case)
                continue
            may_pass = best_case["verdict"] == "undecided" and best_case["change_pct"] <= max_regression
            if even and may_pass and _passed(steady):
                # Steps this even need no more of them to decide.
                rows += [steady, {**best_case, "verdict": "noted", "more_steps": None, "more_runs": None}]
            else:
                rows += [best_case, {**wall, "verdict": "noted"}]
            continue
        measure = STEP_TIME if name == WALL_STEP_TIME else name
        rows.append(_judge(_compare_or_raise(runs, baselines, measure), max_regression))
    return pl.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], schema=COLUMNS)


def _compare_or_raise(runs: Sequence[Job], baselines: Sequence[Job], measure: str) -> dict[str, Any]:
    row = compare_measure(baselines, runs, measure)
    if not row["values_before"] or not row["values_after"]:
        raise AnalysisError(
            f"not all runs recorded {MEASURES[measure][0]}",
            remedy="leave the measure out, or record it",
        )
    return row


def _judge(row: dict[str, Any], limit: float, runs: int = 1, least: float = 0.0) -> dict[str, Any]:
    """Add verdict (passed, failed, undecided), limit_pct, and the missing steps and runs to a measure's comparison.

    least: half width of the interval with any number of steps.
    """
    change, low, high = row["change_pct"], row["low_pct"], row["high_pct"]
    row = {**row, "limit_pct": limit}
    if row.get("negligible"):
        return {**row, "verdict": "passed"}
    if change is None:  # negligible before: the present value is new
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
    more_runs = ceil(runs * (width / target) ** 2) - runs if target > 0 else inf
    return {
        **row,
        "verdict": "undecided",
        "more_steps": max(1, ceil(more)) if more < MAX_ADVISED else None,
        "more_runs": max(1, int(more_runs)) if more_runs < MAX_ADVISED else None,
    }


def _passed(row: dict[str, Any]) -> bool:
    return bool(row["verdict"] == "passed")


def explain_row(table: pl.DataFrame, row: int) -> list[str]:
    """Return a text that explains the verdict of a row of `judge_regression`; empty if it needs no explanation."""
    line = _explanation(table.row(row, named=True), table)
    return [line] if line else []


def _explanation(row: dict[str, Any], table: pl.DataFrame) -> str | None:
    if row["verdict"] == "passed":
        return None
    name = row["measure"]
    if row["change_pct"] is None:
        return f"{name}: negligible in the baseline, now {_format_value(row['after'], row['unit'])}"
    change = f"{row['change_pct']:+.1f} %"
    if row["low_pct"] is not None:
        interval = f"{row['confidence_pct']:.0f} % interval {row['low_pct']:+.1f} to {row['high_pct']:+.1f} %"
        change = f"{change} ({interval})"
    if row["verdict"] == "failed":
        return f"{name}: {change}, more than the {row['limit_pct']:g} % allowed"
    if row["verdict"] == "noted":
        return None if name == BEST_CASE else _explain_wall_step_time(row, change, table)
    needs = [
        f"{row[column]:,} more {noun}{'' if row[column] == 1 else 's'} on each side"
        for column, noun in (("more_steps", "step"), ("more_runs", "run"))
        if row[column] is not None
    ]
    advice = f"needs about {' or '.join(needs)}" if needs else "it is at the limit, or the noise is too large"
    if name == BEST_CASE and _passed(_judge(row, row["limit_pct"])):
        advice = (
            "the steps took longer than that, and their segments do not show why; "
            f"--metric {WALL_STEP_TIME} judges it"
        )
    return f"{name}: undecided, {change} with {row['limit_pct']:g} % allowed; {advice}"


def _format_value(value: float, unit: str) -> str:
    return f"{value / 1e6:,.2f} {'ms' if unit == 'ns' else 'MB'}"


def _explain_wall_step_time(row: dict[str, Any], change: str, table: pl.DataFrame) -> str | None:
    """Explain a longer recorded step time although the best-case step time, which is judged, did not fail."""
    best_case = table.row(by_predicate=pl.col("measure") == BEST_CASE, named=True)
    if best_case["verdict"] == "failed" or row["low_pct"] is None or row["low_pct"] <= best_case["limit_pct"]:
        return None
    if best_case["verdict"] == "passed":
        reason = "but not in the best case: suspect other work on the machine, or occasional slow steps;"
        return f"{row['measure']}: {change}, {reason} --metric {WALL_STEP_TIME} judges it"
    return f"{row['measure']}: {change}; on a machine without other work, --metric {WALL_STEP_TIME} judges it"
