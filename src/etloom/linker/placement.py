"""Determine the parent (enclosing event), depth and step of each host event."""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting
from etloom.core.iterations import find_step_events
from etloom.core.machine import MIN_ARRAY_ROWS, run_both
from etloom.core.nesting import find_innermost
from etloom.core.schema import Stat
from etloom.core.trace import Trace

SEVERAL_DEVICES = "link.several_devices"
"""Name of the row of stats that counts the devices of a rank, where it has more than one."""
_MAX_NAME_LENGTH = 80  # characters of a name in an example


def get_ids(events: pl.DataFrame, rows: np.ndarray, dtype: type[pl.DataType] = pl.UInt32) -> pl.Series:
    """Return the ids of a table at row numbers, as a column; null for row -1."""
    table_ids = events["id"].to_numpy()
    none = rows < 0
    ids = table_ids[np.where(none, 0, rows)] if len(table_ids) else np.zeros(len(rows), np.uint32)
    column = arrays.to_series(ids).cast(dtype)
    return column.set(arrays.to_series(none), None)


def place_events(trace: Trace) -> Trace:
    """Return the Trace with parent, depth and step of host events, and with stats of events that do not nest."""
    events = trace.events
    if not events.height:
        return trace

    def number_steps() -> tuple[pl.DataFrame, pl.Series]:
        steps = find_step_events(events, trace.meta.get("step_name"))
        return steps, _find_event_steps(events, steps)

    at, (steps, step_numbers) = run_both(
        lambda: nesting.nest_events(events, python_ids=_get_python_ids(trace)),
        number_steps,
        events.height,
        MIN_ARRAY_ROWS,
    )
    depth = arrays.to_series(at.depth).set(arrays.to_series(at.depth < 0), None)
    events = events.with_columns(
        get_ids(events, at.parent).alias("parent"),
        depth.alias("depth"),
        step_numbers.alias("step"),
    )
    return trace.replace(events=events).with_stats(
        [
            Stat("link.asynchronous_events", "info", len(at.detached), format_example(events, at.detached)),
            Stat("link.overlapping_events", "info", len(at.crossed), format_example(events, at.crossed)),
            Stat("link.clamped_events", "info", len(at.clamped), format_example(events, at.clamped)),
            Stat("link.unclosed_events", "info", len(at.unclosed), format_example(events, at.unclosed)),
            *_count_shared_steps(steps),
            *_count_devices(events),
        ]
    )


def _get_python_ids(trace: Trace) -> pl.Series | None:
    """Return the Python id of each event; null for events that are not Python functions."""
    if not trace.frames.height:
        return None
    frames = trace.frames.select("python_id", id="event").unique("id", keep="first")
    return trace.events.select("id").join(frames, on="id", how="left", maintain_order="left")["python_id"]


def _count_shared_steps(steps: pl.DataFrame) -> list[Stat]:
    """Return errors for stats if several annotations have the same step number: results by step merge them."""
    if not steps["step"].is_duplicated().any():
        return []
    before = pl.col("end").cum_max().shift(1).over("step", "pid")
    ordered = steps.drop_nulls("step").sort("ts").with_columns(is_again=pl.col("ts") >= before)
    marks = ordered.group_by("step").agg(pl.col("pid").n_unique(), pl.col("is_again").sum()).sort("step")
    merged = "lasts from the earliest begin to the latest end, with the work of all of them"
    shared, repeated = marks.filter(pl.col("pid") > 1), marks.filter(pl.col("is_again") > 0)
    stats = []
    if shared.height:
        step, processes, _ = shared.row(0)
        example = f"step {step} is annotated by {processes} processes: it {merged}"
        stats.append(Stat("link.steps_of_several_processes", "error", shared.height, example))
    if repeated.height:
        step, _, times = repeated.row(0)
        example = f"step {step} is annotated {times + 1} times, one after the other: it {merged}"
        stats.append(Stat("link.repeated_steps", "error", repeated.height, example))
    return stats


def _count_devices(events: pl.DataFrame) -> list[Stat]:
    """Return stats if a rank used several devices: its device results are then sums over all of them."""
    did = categories.mask_events(events, categories.DEVICE_CATEGORIES) & arrays.is_present(events["dur"])
    devices = events["device"].filter(arrays.to_series(did)).drop_nulls().unique().sort().to_list()
    if len(devices) < 2:
        return []
    example = f"devices {', '.join(map(str, devices))}: the rank counts as busy where any of them is"
    return [Stat(SEVERAL_DEVICES, "info", len(devices), example)]


def format_example(events: pl.DataFrame, rows: np.ndarray) -> str | None:
    """Return name and time of the first event of ``rows`` as text, an example for stats; None without rows.

    The table is sorted by time.
    """
    if not rows.size:
        return None
    name, when = events["name"][int(rows[0])] or "(no name)", events["ts"][int(rows[0])] - events["ts"].min()
    short = name if len(name) <= _MAX_NAME_LENGTH else f"{name[:_MAX_NAME_LENGTH]}..."
    return f"{short}, {when / 1e6:.3f} ms into the recording"


def _find_event_steps(events: pl.DataFrame, steps: pl.DataFrame) -> pl.Series:
    """Return the number of the innermost step in which each host event starts; null outside of steps.

    The step may be annotated on another thread.

    If several processes have steps, an event belongs to a step of its own process. Events without a process are
    one process.
    """
    number = np.zeros(events.height, np.int64)
    has_step = np.zeros(events.height, bool)
    hosts = categories.mask_events(events, categories.HOST_CATEGORIES)
    starts = events["ts"].to_numpy()
    processes = steps["pid"].unique()
    for pid in processes:
        process_steps = steps.filter(steps["pid"].eq_missing(pid)).drop_nulls("step")
        rows = np.flatnonzero(
            hosts if len(processes) == 1 else hosts & events["pid"].eq_missing(pid).to_numpy()
        )
        at = find_innermost(process_steps["ts"], process_steps["end"], starts[rows])
        inside = at >= 0
        number[rows[inside]] = process_steps["step"].to_numpy()[at[inside]]
        has_step[rows[inside]] = True
    return arrays.to_series(number).set(arrays.to_series(~has_step), None)
