"""Peak memory allocation by device and step, and the operator that holds most of it at the peak.

One row per device and step, and one with a null step for the whole recording. peak_bytes is the maximum allocation (at
peak_at_ns, peak_after_ns after the first recorded entry of the device's allocator), including what was allocated
before the step. In a memory snapshot, peak_bytes counts requested sizes, and peak_rounded_bytes counts the sizes of the
allocator's blocks at the same time, like torch.cuda.max_memory_allocated. A snapshot without times (PyTorch before 2.2)
has only the row of the whole recording. peak_reserved_bytes is the largest amount that the allocator reserved from the
device. operator is the innermost operator whose allocations hold most bytes (operator_bytes) at the peak, or, in a
memory snapshot, the innermost Python line outside of torch. unknown_bytes is the part of the peak that was allocated
before the recording; its operators are unknown. Memory of several processes of a rank on a device is summed.

Units: B, ns. For host memory, device_type is 0 and device is null (c10::DeviceType).
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import Step, check_step, conform_columns, require_linked
from etloom.core import categories
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import AnalysisError
from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, find_steps
from etloom.timeline.allocations import find_allocations
from etloom.timeline.memory.program import find_line

SCOPE = "rank"
COLUMNS = {
    "device_type": pl.Int64,
    "device": pl.Int64,
    "step": pl.Int64,
    "peak_bytes": pl.Int64,
    "peak_rounded_bytes": pl.Int64,
    "peak_at_ns": pl.Int64,
    "peak_after_ns": pl.Int64,
    "peak_reserved_bytes": pl.Int64,
    "allocations": pl.Int64,
    "operator": pl.String,
    "operator_bytes": pl.Int64,
    "unknown_bytes": pl.Int64,
}


def analyze(trace: Trace, *, step: Step = None) -> pl.DataFrame:
    require_linked(trace)
    allocations = find_allocations(trace, in_order=True)
    if not allocations.height:
        raise AnalysisError(
            "the trace contains no allocations",
            where=describe_rank(trace),
            remedy="record with profile_memory=True, or open a torch.cuda.memory._dump_snapshot()",
        )
    check_step(trace, step)
    windows: list[tuple[int | None, int | None, int | None]] = list(find_steps(trace).iter_rows())
    windows = [row for row in windows if step in (None, row[0])] + (
        [(None, None, None)] if step is None else []
    )
    rows = []
    allocations = parse_distinct(allocations, "stack", find_line, pl.String, alias="line")
    attributed = allocations.with_columns(
        operator=_operator_names(trace, allocations).fill_null(allocations["line"])
    )
    for _, device_events in attributed.group_by("device_type", "device", maintain_order=True):
        times = device_events["ts"].fill_null(0).to_numpy()
        for number, start, end in windows:
            if start is None or end is None:
                rows.append(_make_row(device_events, 0, device_events.height, device_events["ts"][0], number))
            elif device_events["ts"][0] is None:
                continue
            else:
                first, last = np.searchsorted(times, [start, end]).tolist()
                rows.append(_make_row(device_events, first, last, start, number))
    table = pl.DataFrame(rows, schema=COLUMNS, orient="row")
    table = table.join(_find_first_entries(trace), on=["device_type", "device"], how="left", nulls_equal=True)
    table = table.with_columns(peak_after_ns=pl.col("peak_at_ns") - pl.col("first_ns"))
    return conform_columns(table, COLUMNS).sort(
        "device_type", "device", "step", nulls_last=True, maintain_order=True
    )


def _make_row(
    device_events: pl.DataFrame, first: int, last: int, begin: int | None, number: int | None
) -> tuple[object, ...]:
    """Return a step's table row from the memory events ``first`` to ``last`` of a device; ``begin``: start of the step
    (ns), None without times."""
    in_step = device_events[first:last]
    peak, peak_at, until = in_step["total_allocated"].max(), None, first
    rounded = device_events["total_rounded"][first - 1] if first else None
    # Allocation at the start of the step: as of the previous event, else before the first event's change.
    initial = (
        device_events["total_allocated"][first - 1]
        if first
        else device_events["total_allocated"][0] - device_events["bytes"][0]
    )
    if peak is None or initial > peak:  # type: ignore[operator]
        peak, peak_at = initial, begin
    else:
        at = in_step["total_allocated"].arg_max() or 0
        peak_at, until, rounded = in_step["ts"][at], first + at + 1, in_step["total_rounded"][at]
    # An address is live if its last event until then is an allocation.
    live = device_events[:until].group_by("pid", "addr").last().filter(pl.col("bytes") > 0)
    by_operator = live.group_by("operator").agg(pl.col("bytes").sum()).drop_nulls().sort("bytes", "operator")
    name, operator_bytes = (
        (by_operator["operator"][-1], by_operator["bytes"][-1]) if by_operator.height else (None, None)
    )
    unknown = max(0, peak - int(live["bytes"].sum()))  # type: ignore[operator]
    reserved = device_events["total_reserved"][max(0, first - 1) : last].max()
    return (
        device_events["device_type"][0], device_events["device"][0], number, peak, rounded, peak_at,
        None, reserved,
        in_step.filter(pl.col("bytes") > 0).height, name, operator_bytes, unknown,
    )  # fmt: skip


def _find_first_entries(trace: Trace) -> pl.DataFrame:
    """Return device_type, device, and the time of the allocator's first entry (first_ns), also of a segment."""
    keys = [pl.col(name).cast(pl.Int64) for name in ("device_type", "device")]
    changes = trace.memory.select(*keys, "ts")
    is_entry = pl.col("cat").cast(pl.String) == "memory_snapshot"
    others = trace.events.filter(is_entry).select(pl.lit(1, pl.Int64).alias("device_type"), keys[1], "ts")
    return pl.concat([changes, others]).group_by("device_type", "device").agg(first_ns=pl.col("ts").min())


def _operator_names(trace: Trace, memory: pl.DataFrame) -> pl.Series:
    """Return the name of the innermost operator that runs on the thread at each memory event, null for none."""
    events = trace.events
    thread = [pl.col(name).fill_null(-1) for name in ("pid", "tid")]
    is_operator_row = pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)) & pl.col("dur").is_not_null()
    calls = events.filter(is_operator_row).select(*thread, "ts", "id").sort("ts", maintain_order=True)
    if not calls.height:
        return pl.Series([None] * memory.height, dtype=pl.String)
    last_started = memory.select(*thread, "ts").join_asof(
        calls, on="ts", by=["pid", "tid"], strategy="backward", check_sortedness=False
    )
    row = rows_of_ids(events, last_started["id"])
    parent = rows_of_ids(events, events["parent"])
    end = (events["ts"] + events["dur"].fill_null(0)).to_numpy()
    operator = events.select(is_operator_row).to_series().to_numpy()
    times = memory["ts"].to_numpy()
    while (ended := (row >= 0) & ((end[row] < times) | ~operator[row])).any():
        row = np.where(ended, parent[row], row)
    names: pl.Series = events["name"].cast(pl.String)[np.maximum(row, 0)]
    return names.set(pl.Series(row < 0), None)
