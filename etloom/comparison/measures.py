"""What runs are compared by: one value a step, the mean over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses import temporal_breakdown
from etloom.comparison.shift_estimate import estimate_shift
from etloom.core.errors import UnknownName
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import find_steps, select_device_events


def _steps_or_whole(table: pl.DataFrame) -> pl.DataFrame:
    """Of rows by step and one of the whole, those of steps where there are any."""
    of_steps = table.filter(pl.col("step").is_not_null())
    return of_steps if of_steps.height else table


def _breakdown_column(column: str) -> Callable[[Trace], pl.DataFrame | None]:
    return lambda trace: _steps_or_whole(temporal_breakdown.analyze(trace)).select("step", value=column)


def _device_busy(trace: Trace) -> pl.DataFrame | None:
    return _breakdown_column("busy_ns")(trace) if select_device_events(trace).height else None


def _peak_memory(trace: Trace) -> pl.DataFrame | None:
    """The most that was allocated in a step on one device, or on the host if the trace tells of no device; as
    memory-timeline, with what was there when the step began."""
    known = trace.memory.drop_nulls(["total_allocated", "ts", "bytes"]).sort("ts", "id")
    on_devices = known.filter(pl.col("device_type") != 0)
    known = on_devices if on_devices.height else known
    if not known.height:
        return None
    marks = find_steps(trace)
    peaks = [
        _peaks(own, marks["start"].to_numpy(), marks["end"].to_numpy())
        for _, own in known.group_by("device_type", "device")
    ]
    numbers = marks["step"] if marks.height else pl.Series([None], dtype=pl.Int64)
    return pl.DataFrame({"step": numbers, "value": pl.Series(np.max(peaks, axis=0), dtype=pl.Int64)})


def _peaks(own: pl.DataFrame, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The most allocated on a device in each of these spans, or if there are none, in all."""
    # Before its first event: what that one left, less what it changed.
    level = np.append(own["total_allocated"][0] - own["bytes"][0], own["total_allocated"].to_numpy())
    if not starts.size:
        return np.array([level.max()])
    first, last = (np.searchsorted(own["ts"].to_numpy(), at) for at in (starts, ends))
    return np.array([level[one : other + 1].max() for one, other in zip(first, last, strict=True)])


MEASURES: Mapping[str, tuple[str, str, Callable[[Trace], pl.DataFrame | None]]] = {
    "step-time": ("step time", "ns", _breakdown_column("span_ns")),
    "device-busy": ("device busy", "ns", _device_busy),
    "exposed-communication": (
        "exposed communication",
        "ns",
        _breakdown_column("exposed_communication_ns"),
    ),
    "peak-memory": ("peak memory", "B", _peak_memory),
}
"""Name -> what it is called, unit, and (step, value) of a rank, or None where the rank does not tell."""


def step_values(job: Job, measure: str) -> list[float]:
    """One value a step in order of steps, the mean over the ranks; of a run without steps, one of all of it.

    Empty where no rank tells. Raises UnknownName.
    """
    if measure not in MEASURES:
        raise UnknownName("measure", measure, MEASURES)
    found = [table for trace in job.values() if (table := MEASURES[measure][2](trace)) is not None]
    if not found:
        return []
    means = pl.concat(found).group_by("step").agg(pl.col("value").mean().cast(pl.Float64)).sort("step")
    return means["value"].to_list()


MEASURE_SCHEMA = {
    "measure": pl.String,
    "unit": pl.String,
    "before": pl.Float64,
    "after": pl.Float64,
    "change": pl.Float64,
    "change_pct": pl.Float64,
    "low_pct": pl.Float64,
    "high_pct": pl.Float64,
    "confidence_pct": pl.Float64,
    "values_before": pl.Int64,
    "values_after": pl.Int64,
}
NEGLIGIBLE = 0.001
"""Of the time of a step: a part of less is as good as none, and so is a change of less."""
NEGLIGIBLE_BYTES = 1_000_000


def compare_measures(before: Sequence[Job], after: Sequence[Job]) -> pl.DataFrame:
    """COLUMNS of all measures that a side tells of."""
    rows = [compare_measure(before, after, name) for name in MEASURES]
    told = [row for row in rows if row["values_before"] or row["values_after"]]
    return pl.DataFrame([{name: row[name] for name in MEASURE_SCHEMA} for row in told], schema=MEASURE_SCHEMA)


def compare_measure(before: Sequence[Job], after: Sequence[Job], name: str) -> dict[str, Any]:
    """COLUMNS, and whether it is ``negligible`` on both sides, of one measure; a run's steps follow on those of the run
    before it.

    before and after are medians over the steps. change_pct and its interval are `shift`'s, on which a verdict rests,
    and change is that part of before: the difference of the medians may be another. Where there was next to nothing
    before, percentages are null and change is that difference.
    """
    first, second = ([value for job in jobs for value in step_values(job, name)] for jobs in (before, after))
    row: dict[str, Any] = dict.fromkeys(MEASURE_SCHEMA)
    row |= {"measure": MEASURES[name][0], "unit": MEASURES[name][1], "negligible": False}
    row |= {"values_before": len(first), "values_after": len(second)}
    row["before"], row["after"] = (pl.Series(side, dtype=pl.Float64).median() for side in (first, second))
    if not first or not second:
        return row
    row["change"] = row["after"] - row["before"]
    if MEASURES[name][1] == "ns":
        whole = pl.Series(
            [value for job in before for value in step_values(job, "step-time")], dtype=pl.Float64
        )
        little = NEGLIGIBLE * float(whole.median() or 0)  # type: ignore[arg-type]
    else:
        little = float(NEGLIGIBLE_BYTES)
    if name == "step-time":
        little = 0.0
    row["negligible"] = max(row["before"], row["after"]) <= little
    found = estimate_shift(first, second)
    if found is not None and row["before"] > little:
        row["change_pct"] = found.percent
        row["change"] = row["before"] * found.percent / 100
        if found.is_known:
            row["low_pct"], row["high_pct"] = found.low, found.high
            row["confidence_pct"] = 100 * found.confidence
    return row
