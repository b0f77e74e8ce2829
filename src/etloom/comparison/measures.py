"""Measures by which runs are compared: step time, device busy time, exposed communication, peak memory, and more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses import temporal_breakdown
from etloom.analyses.helpers.run_tables import RunTable
from etloom.comparison.change_estimate import CONFIDENCE, estimate_shift, measure_level
from etloom.core.errors import UnknownName
from etloom.core.trace import Job, Trace
from etloom.timeline.activity import compute_activity, find_steps, has_device_events
from etloom.timeline.allocations import find_allocations


def _breakdown_column(column: str) -> Callable[[Trace, bool], pl.DataFrame | None]:
    def measure(trace: Trace, stepped: bool) -> pl.DataFrame:
        table = temporal_breakdown.analyze(trace).select("step", value=column)
        return table.filter(pl.col("step").is_not_null() == stepped)

    return measure


def _device_busy(trace: Trace, stepped: bool) -> pl.DataFrame | None:
    has_device = trace.compute_once(has_device_events)
    return _breakdown_column("busy_ns")(trace, stepped) if has_device else None


def _peak_memory(trace: Trace, stepped: bool) -> pl.DataFrame | None:
    table: pl.DataFrame = measure_rank(trace, measure_peak_memory, stepped)
    return table if table.height else None


def measure_peak_memory(trace: Trace, stepped: bool | None) -> pl.DataFrame:
    """Return the peak of allocated memory of a rank, bytes, per step (or for the run): columns step, value.

    The peak on the device where it is highest, or on the host if no device is recorded.

    As in memory-timeline, it includes memory that was allocated when the step began. Empty without a record of memory.
    """
    allocations = find_allocations(trace)
    on_devices = allocations.filter(pl.col("device_type") != 0)
    allocations = on_devices if on_devices.height else allocations
    if not allocations.height:
        return pl.DataFrame(schema={"step": pl.Int64, "value": pl.Int64})
    marks = find_steps(trace) if is_stepped(trace, stepped) else find_steps(trace).clear()
    peaks = [
        _peaks(rows, marks["start"].to_numpy(), marks["end"].to_numpy())
        for _, rows in allocations.group_by("device_type", "device")
    ]
    numbers = marks["step"] if marks.height else pl.Series([None], dtype=pl.Int64)
    return pl.DataFrame({"step": numbers, "value": pl.Series(np.max(peaks, axis=0), dtype=pl.Int64)})


def _peaks(rows: pl.DataFrame, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the peak of allocated memory on a device, bytes, in each time span; without spans, over all time.

    ``starts``, ``ends``: of the spans, ns.
    """
    # Before its first event: the total after it minus its change.
    level = np.append(rows["total_allocated"][0] - rows["bytes"][0], rows["total_allocated"].to_numpy())
    if not starts.size:
        return np.array([level.max()])
    first, last = (np.searchsorted(rows["ts"].to_numpy(), at) for at in (starts, ends))
    return np.array([level[low : high + 1].max() for low, high in zip(first, last, strict=True)])


MEASURES: Mapping[str, tuple[str, str, Callable[[Trace, bool], pl.DataFrame | None]]] = {
    "step-time": ("step time", "ns", _breakdown_column("span_ns")),
    "device-busy": ("device busy", "ns", _device_busy),
    "exposed-communication": (
        "exposed communication",
        "ns",
        _breakdown_column("exposed_communication_ns"),
    ),
    "peak-memory": ("peak memory", "B", _peak_memory),
}
"""Name -> label, unit, and function that returns (step, value) of a rank, or None if the rank lacks it; per step, or
with False one value for the run."""


def step_values(job: Job, measure: str, stepped: bool | None = None) -> list[float]:
    """Return the values of a measure, one per step, as means over the ranks; a single value without steps.

    Args:
        job: linked traces.
        measure: one of `MEASURES`.
        stepped: False for one value although the run has steps, as a comparison with a run without steps needs it.

    Returns:
        The values; empty if no rank has the measure.

    Raises:
        UnknownName: there is no such measure.
    """
    if measure not in MEASURES:
        raise UnknownName("measure", measure, MEASURES)
    if stepped is None or stepped == has_steps(job):
        return VALUES[measure].read(job)["value"].to_list()
    return _measure_steps(measure, stepped, job)


def _measure_steps(measure: str, stepped: bool, job: Job) -> list[float]:
    measure_trace = MEASURES[measure][2]
    tables = [table for trace in job.values() if (table := measure_trace(trace, stepped)) is not None]
    if not tables:
        return []
    means = pl.concat(tables).group_by("step").agg(pl.col("value").mean().cast(pl.Float64)).sort("step")
    return means["value"].to_list()


def _tabulate_measure(measure: str, job: Job) -> pl.DataFrame:
    return pl.DataFrame({"value": _measure_steps(measure, has_steps(job), job)}, schema={"value": pl.Float64})


VALUES = {
    name: RunTable(
        f"compared-{name}", {"value": pl.Float64}, partial(_tabulate_measure, name), has_nulls=False
    )
    for name in MEASURES
}
"""The values of `step_values` of a run as it is compared with one that has steps if it has some itself."""


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
"""Share of the step time below which a part or a change is negligible."""
NEGLIGIBLE_BYTES = 1_000_000


def compare_measures(before: Sequence[Job], after: Sequence[Job]) -> pl.DataFrame:
    """Compare all measures that the runs before or after recorded; one row each (`MEASURE_SCHEMA`)."""
    rows = [compare_measure(before, after, name) for name in MEASURES]
    available = [row for row in rows if row["values_before"] or row["values_after"]]
    return pl.DataFrame(
        [{name: row[name] for name in MEASURE_SCHEMA} for row in available], schema=MEASURE_SCHEMA
    )


def compare_measure(before: Sequence[Job], after: Sequence[Job], name: str) -> dict[str, Any]:
    """Compare a measure between the runs of two sides; without step annotations in a run, each run has one value.

    Returns the values of `MEASURE_SCHEMA`, and ``negligible``: whether the measure is so on both sides. before and
    after are the levels of `estimate_shift`: medians over the steps, and means of these over runs. If before is
    negligible, percentages are null.
    """
    stepped = all(map(has_steps, (*before, *after)))
    first, second = ([step_values(job, name, stepped) for job in jobs] for jobs in (before, after))
    row: dict[str, Any] = dict.fromkeys(MEASURE_SCHEMA)
    row |= {"measure": MEASURES[name][0], "unit": MEASURES[name][1], "negligible": False}
    row |= {"values_before": sum(map(len, first)), "values_after": sum(map(len, second))}
    row["before"], row["after"] = (measure_level(side) for side in (first, second))
    if row["before"] is None or row["after"] is None:
        return row
    row["change"] = row["after"] - row["before"]
    if name == "step-time":
        negligible = 0.0
    elif row["unit"] == "B":
        negligible = float(NEGLIGIBLE_BYTES)
    else:
        negligible = NEGLIGIBLE * (
            measure_level([step_values(job, "step-time", stepped) for job in before]) or 0.0
        )
    row["negligible"] = max(row["before"], row["after"]) <= negligible
    if row["before"] > negligible and (shift := estimate_shift(first, second)):
        row["change_pct"] = shift.percent
        if shift.is_known:
            row |= {"low_pct": shift.low, "high_pct": shift.high, "confidence_pct": 100 * CONFIDENCE}
    return row


# Tables about a run that comparisons need: the number of steps of its ranks and the basis of its categories.


def _count_steps(job: Job) -> pl.DataFrame:
    counts = [find_steps(trace).height for trace in job.values()]
    return pl.DataFrame([(min(counts), max(counts))], schema=STEPS.schema, orient="row")


def _list_bases(job: Job) -> pl.DataFrame:
    return pl.DataFrame({"basis": sorted({compute_activity(trace).basis for trace in job.values()})})


STEPS = RunTable(
    "compared-steps", {"least": pl.Int64, "most": pl.Int64}, _count_steps, has_nulls=False, rows=1
)
"""The least and the largest number of steps of a rank."""
BASES = RunTable("compared-bases", {"basis": pl.String}, _list_bases, has_nulls=False)
"""The basis of the categories of each rank: device or host time."""


def has_steps(job: Job) -> bool:
    """Return whether every rank of a job has step annotations; if not, the run is compared as a whole."""
    return bool(STEPS.read(job)["least"].item())


def is_stepped(trace: Trace, stepped: bool | None) -> bool:
    """Return ``stepped`` unless it is None, else whether the rank has step annotations."""
    return bool(find_steps(trace).height) if stepped is None else stepped


def measure_rank(trace: Trace, function: Callable[..., Any], stepped: bool) -> Any:
    """Return ``function(trace, stepped)``, taken from the run's store if the result is stored there.

    A store contains ``function(trace, None)``, which divides by the number of steps of the rank if it has any.
    """
    return trace.compute_once(function, None if stepped == is_stepped(trace, None) else stepped)
