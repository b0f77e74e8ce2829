"""Judge whether runs are slower than baselines by more than a limit, beyond noise, for use in CI jobs.

failed: the whole interval of the change (`etloom.comparison.change_estimate`) lies above the limit. passed: it lies
below. undecided: it contains the limit; more steps or runs narrow the interval.

A step time is also undecided if other work on the machine may be the reason for the verdict. With uneven steps only a
narrow interval decides. A slowdown needs a narrow interval of three or more runs, or of a single run on each side with
GPU activity and even steps; or an interval above MAX_RUN_DIFFERENCE, with even steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import Any

import numpy as np
import polars as pl

from etloom.comparison.change_estimate import MIN_RUNS, MIN_STEPS
from etloom.comparison.measures import BASES, MEASURES, compare_measure, has_steps, step_values
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Job

STEP_TIME = "step-time"
METRICS = tuple(MEASURES)
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
MAX_RUN_DIFFERENCE = 25.0
"""Percent: single runs of one program on hosts differed by up to a quarter, although each had even steps."""
MAX_EVEN_RATIO = 1.1
"""Maximum ratio of the upper and the lower quartile of the step times of a run with even steps. Other work on the
machine makes some steps take 1.9 to 7 times as long as others."""
NARROW_PCT = 3.0
"""An interval is narrow if half its width is at most the limit or this."""
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
        One row per measure (`COLUMNS`). verdict: passed, failed or undecided. more_steps, more_runs: needed on each
        side to decide an undecided measure; null if that would not help.

    Raises:
        UnknownName: The metric does not exist.
        AnalysisError: a side lacks the measure.
    """
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(metrics):
        if name not in METRICS:
            raise UnknownName("metric", name, METRICS, option="metric")
        if name == STEP_TIME and not all(map(has_steps, (*baselines, *runs))):
            side = "the baseline" if all(map(has_steps, runs)) else "the judged run"
            raise AnalysisError(
                f"{side} has no step annotations: its step time is unknown",
                remedy="record it with etloom collect or torch.profiler's schedule, or judge another --metric",
            )
        row = compare_measure(baselines, runs, name) | {"limit_pct": max_regression}
        if not row["values_before"] or not row["values_after"]:
            raise AnalysisError(
                f"not all runs recorded {MEASURES[name][0]}",
                remedy="leave the measure out, or record it",
            )
        row["verdict"] = _judge(row)
        is_decided = row["verdict"] != "undecided" and row["low_pct"] is not None
        if name == STEP_TIME and is_decided and _may_be_noise(row, (*runs, *baselines)):
            row["verdict"] = "undecided"
            count, target = min(len(runs), len(baselines)), _narrow_pct(row)
            more_runs = _advise(_relative_half_width(row), count, target)
            row["more_runs"] = None if more_runs is None else max(2, more_runs)
        elif row["verdict"] == "undecided":
            row |= _advise_more(row, len(runs), len(baselines))
        rows.append(row)
    return pl.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], schema=COLUMNS)


def _judge(row: dict[str, Any]) -> str:
    """Return the verdict on a measure, by its interval alone."""
    if row["negligible"]:
        return "passed"
    if row["change_pct"] is None:  # negligible before: the present value is new
        return "failed"
    if row["low_pct"] is None or row["low_pct"] <= row["limit_pct"] < row["high_pct"]:
        return "undecided"
    return "failed" if row["low_pct"] > row["limit_pct"] else "passed"


def _may_be_noise(row: dict[str, Any], jobs: Sequence[Job]) -> bool:
    """Return whether other work on the machine may be the reason for the verdict on a step time."""
    quartiles = np.array([np.quantile(step_values(job, STEP_TIME), (0.25, 0.75)) for job in jobs])
    is_even = bool((quartiles[:, 1] <= MAX_EVEN_RATIO * quartiles[:, 0]).all())
    is_narrow = _relative_half_width(row) <= _narrow_pct(row)
    if row["verdict"] == "passed":
        return not is_even and not is_narrow
    has_device = any("device" in BASES.read(job)["basis"] for job in jobs)
    is_shown = is_narrow and (len(jobs) >= MIN_RUNS or (has_device and is_even))
    return not is_shown and not (is_even and row["low_pct"] > MAX_RUN_DIFFERENCE)


def _narrow_pct(row: dict[str, Any]) -> float:
    return float(max(row["limit_pct"], NARROW_PCT))


def _half_width(row: dict[str, Any]) -> float:
    return float(row["high_pct"] - row["low_pct"]) / 2


def _relative_half_width(row: dict[str, Any]) -> float:
    """Return half of the interval in percent of the larger level, with which the noise of a run grows."""
    return _half_width(row) / max(1.0, 1 + float(row["change_pct"]) / 100)


def _advise_more(row: dict[str, Any], runs: int, baselines: int) -> dict[str, int | None]:
    """Return how many more steps, and how many more runs, would decide a measure whose interval contains the limit."""
    steps = min(row["values_before"], row["values_after"])
    if row["low_pct"] is None:
        return {"more_steps": max(1, MIN_STEPS - steps)}
    margin = abs(row["change_pct"] - row["limit_pct"])
    more_runs = _advise(_half_width(row), min(runs, baselines), margin)
    if runs + baselines >= MIN_RUNS:
        return {"more_runs": more_runs}
    return {"more_runs": more_runs, "more_steps": _advise(_half_width(row), steps, margin)}


def _advise(half_width: float, count: int, target: float) -> int | None:
    """Return how many more than ``count`` steps or runs narrow ``half_width`` percent to ``target`` percent.

    None if that is more than MAX_ADVISED: the change is at the limit.
    """
    more = count * ((half_width / target) ** 2 - 1) if target else inf
    return max(1, ceil(more)) if more < MAX_ADVISED else None


def explain_row(table: pl.DataFrame, row: int) -> list[str]:
    """Return a text that explains the verdict of a row of `judge_regression`; empty if it passed."""
    return [] if table["verdict"][row] == "passed" else [_explanation(table.row(row, named=True))]


def _explanation(row: dict[str, Any]) -> str:
    name = row["measure"]
    if row["change_pct"] is None:
        value = f"{row['after'] / 1e6:,.2f} {'ms' if row['unit'] == 'ns' else 'MB'}"
        return f"{name}: negligible in the baseline, now {value}"
    change = f"{row['change_pct']:+.1f} %"
    if row["low_pct"] is not None:
        interval = f"{row['confidence_pct']:.0f} % interval {row['low_pct']:+.1f} to {row['high_pct']:+.1f} %"
        change = f"{change} ({interval})"
    if row["verdict"] == "failed":
        return f"{name}: {change}, more than the {row['limit_pct']:g} % allowed"
    needs = [
        f"{row[column]:,} more {noun}{'' if row[column] == 1 else 's'} on each side"
        for column, noun in (("more_steps", "step"), ("more_runs", "run"))
        if row[column] is not None
    ]
    advice = f"needs about {' or '.join(needs)}" if needs else "it is at the limit, or the noise is too large"
    if row["low_pct"] is not None and not row["low_pct"] <= row["limit_pct"] < row["high_pct"]:
        advice = f"other work on the machine may be the reason; {advice}"
    return f"{name}: undecided, {change} with {row['limit_pct']:g} % allowed; {advice}"
