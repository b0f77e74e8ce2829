"""The time of a step that covers all that it does, from the table of the analysis steps."""

from __future__ import annotations

import polars as pl

MIN_DEVICE_TAIL = 0.01
"""Share of the time of all steps above which GPU activity after the last annotation on the host belongs to steps."""
STEP_BASES = {
    "annotation": "from the start to the end of its annotation on the host",
    "period": "from the end of the GPU activity of the step before to the end of its own",
    "extent": "from the start of its annotation (of its GPU activity, if that is later) until its GPU activity ends",
}
"""Basis of step times, as `measure_step_times` names it -> the time from which to which a step lasts."""


def measure_device_tail(steps: pl.DataFrame) -> int:
    """Return the time from the end of the last step annotation to the end of the GPU activity of the steps, ns.

    The host runs ahead of the device, so the annotations may end long before the work they launched; 0 if they do not.
    Of several ranks, the longest.

    Args:
        steps: the tables of ranks.
    """
    ends = steps.group_by("rank").agg(
        device=pl.col("device_end_ns").max(), host=(pl.col("start_ns") + pl.col("dur_ns")).max()
    )
    longest = (ends["device"] - ends["host"]).max()
    return max(0, longest) if isinstance(longest, int) else 0


def measure_step_times(steps: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Return the time of each step, which covers all that the step does, and what was measured.

    On the host a step lasts as long as its annotation. If the device lags behind, so that the annotation ends before
    the GPU activity that it launched, a step lasts from the end of the GPU activity of the step before to the end of
    its own. Without consecutive steps, it lasts from the begin of its annotation (or from its first GPU activity, if
    the annotation had ended by then) to the end of its GPU activity.

    Args:
        steps: the tables of ranks.

    Returns:
        rank, step, time_ns; and "annotation", "period" (end to end) or "extent".
    """
    by_annotation = steps.select("rank", "step", time_ns="dur_ns")
    tail_ns = measure_device_tail(steps)
    ranks = max(steps["rank"].n_unique(), 1)
    if tail_ns < max(1, MIN_DEVICE_TAIL * int(steps["dur_ns"].sum()) / ranks):
        return by_annotation, "annotation"
    periods = _measure_device_periods(steps)
    if periods.height:
        return periods, "period"
    host_end = pl.col("start_ns") + pl.col("dur_ns")
    begin = pl.when(pl.col("device_start_ns") >= host_end).then("device_start_ns").otherwise("start_ns")
    extents = steps.select(
        "rank", "step", time_ns=pl.max_horizontal(host_end, "device_end_ns").fill_null(host_end) - begin
    )
    return extents, "extent"


def _measure_device_periods(steps: pl.DataFrame) -> pl.DataFrame:
    """Return rank, step, and the time between the ends of the GPU activity of consecutive steps, ns.

    This is the step time if the device lags behind the host: its annotations then end when the launches are done.
    """
    ordered = steps.drop_nulls("device_end_ns").sort("rank", "step")
    periods = ordered.select(
        "rank",
        "step",
        follows=pl.col("step") - pl.col("step").shift().over("rank") == 1,
        time_ns=pl.col("device_end_ns") - pl.col("device_end_ns").shift().over("rank"),
    ).filter("follows")
    return periods.select("rank", "step", "time_ns")
