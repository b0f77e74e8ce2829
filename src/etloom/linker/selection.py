"""Select a part of a run as a new run: by ranks, step, time range, names of events, or categories.

Selected events remain together with the rows of other tables that describe them, so that every analysis works on
the part. Several filters select the events that pass all of them:

- ranks: only these.
- step: the events of this step; GPU activity is of the step that launched it.
- time: events that begin in [start, end), complete, counted from the first recorded event of the run (of the rank, if
  clocks are not the epoch's) that is not internal to the profiler. So consecutive ranges partition all events: an
  event across a border belongs to the first.
- names: the events whose name matches one of these globs (* ? [...], case-sensitive), all events nested in them on
  their thread, all GPU activity launched there, and the call that launched any selected GPU activity.
- categories: the events of these categories (cpu_op, kernel, gpu_memcpy, ...), the GPU activity of these types
  (computation, communication, memory, other), and the call that launched any selected GPU activity.

Step annotations stay under names and categories, so that results by step remain valid. An event whose parent is
dropped gets the nearest remaining ancestor as its parent. A row of another table that describes a dropped event is
dropped; one that only refers to it (the call of a launch, the operator around it) loses the reference. Nodes of
execution traces stay.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories as kinds
from etloom.core.arrays import is_in, rows_of_ids, to_array
from etloom.core.errors import AnalysisError
from etloom.core.iterations import find_step_events
from etloom.core.nesting import find_nearest_ancestor
from etloom.core.schema import TABLES
from etloom.core.text import TimeRange, format_ranks, unknown_rank_error
from etloom.core.trace import Job, Trace

RowArray = NDArray[np.int64]
MaskArray = NDArray[np.bool_]

_OPTIONAL_REFERENCES = {
    ("events", "parent"),
    ("launches", "launch"),
    ("launches", "operator"),
    ("launches", "captured"),
    ("sync_dependencies", "sync"),
}
"""Columns whose reference may become null; if any other reference of a row is lost, the row is left out, since it
describes the event."""
_MAX_NS = 1 << 63


def select_part(
    job: Job,
    *,
    ranks: Collection[int] = (),
    step: int | None = None,
    time: TimeRange | None = None,
    names: Collection[str] = (),
    categories: Collection[str] = (),
) -> Job:
    """Return the part of a linked job that passes all filters; without filters the job itself.

    Args:
        job: A linked job.
        ranks: Ranks to keep.
        step: Number of a step.
        time: Start and end in ns.
        names: Globs of event names.
        categories: Event categories or kernel types.

    Raises:
        AnalysisError: There is no such rank or category, or nothing is left.
    """
    if missing := sorted(set(ranks) - set(job)):
        raise unknown_rank_error(missing, job)
    if ranks:
        job = Job({rank: job[rank] for rank in job if rank in set(ranks)}, job.meta, job.run_stats)
    if step is None and time is None and not names and not categories:
        return job
    if categories:
        _check_categories(job, categories)
    begins: dict[int, Any] = {
        rank: trace.compute_once(kinds.count_events)["work_start"].min() for rank, trace in job.items()
    }
    firsts: dict[int, int] = {rank: begin for rank, begin in begins.items() if begin is not None}
    share_clock = all(trace.meta.get("clock") == "epoch" for trace in job.values())
    parts, matched = {}, dict.fromkeys(("step", "time", "name", "category", "all"), False)
    for rank, trace in job.items():
        first = min(firsts.values(), default=0) if share_clock else firsts.get(rank, 0)
        start, end = time or (None, None)
        window = (None if start is None else first + start, None if end is None else first + end)
        masks = _build_masks(trace, step, window if time else None, names, categories)
        selected = _add_captured_events(trace, np.logical_and.reduce(list(masks.values())))
        for filter_name, mask in {**masks, "all": selected}.items():
            matched[filter_name] |= bool(mask.any())
        parts[rank] = _select_rank_part(trace, selected, masks, window)
    if not matched["all"]:
        raise _empty_selection_error(job, step, names, categories, matched, bool(time))
    return Job(parts, job.meta, job.run_stats)


def _empty_selection_error(
    job: Job,
    step: int | None,
    names: Collection[str],
    categories: Collection[str],
    matched: dict[str, bool],
    timed: bool,
) -> AnalysisError:
    """Return the error for an empty selection: it names the filter that matched nothing.

    If every filter matches some events, it names all of them.
    """
    scope = f" of {format_ranks(job)}"
    reasons = {
        "step": (step is not None, f"unknown step {step}{scope}", _describe_steps(job)),
        "name": (bool(names), f"no event{scope} has a name that matches {' or '.join(map(repr, names))}",
                 "patterns match the whole name and are case-sensitive: '*gemm*', 'aten::*'"),
        "category": (bool(categories), f"no event{scope} is of category {' or '.join(map(repr, categories))}",
                     "choose another category"),
        "time": (timed, f"no event{scope} begins in that time", "it is counted from the first event of the run"),
    }  # fmt: skip
    for filter_name, (is_used, problem, remedy) in reasons.items():
        if is_used and not matched[filter_name]:
            return AnalysisError(problem, remedy=remedy)
    filters = [filter_name for filter_name, (is_used, _, _) in reasons.items() if is_used]
    return AnalysisError(
        f"no event{scope} matches all filters ({', '.join(filters)}), although each filter matches some",
        remedy="leave one out",
    )


def _check_categories(job: Job, categories: Collection[str]) -> None:
    available = {str(cat) for trace in job.values() for cat in trace.events["cat"].unique().drop_nulls()}
    if unknown := sorted(set(categories) - available - set(kinds.KERNEL_TYPES)):
        raise AnalysisError(
            f"unknown category {unknown[0]!r}",
            remedy=f"known: {', '.join(sorted(available | set(kinds.KERNEL_TYPES)))}",
        )


def _describe_steps(job: Job) -> str:
    steps = sorted({step for trace in job.values() for step in trace.events["step"].drop_nulls().unique()})
    if not steps:
        return "no steps are marked"
    few = ", ".join(map(str, steps)) if len(steps) <= 8 else f"{steps[0]} to {steps[-1]}"
    return f"there {'is' if len(steps) == 1 else 'are'} {few}"


def _build_masks(
    trace: Trace,
    step: int | None,
    window: TimeRange | None,
    names: Collection[str],
    categories: Collection[str],
) -> dict[str, MaskArray]:
    """Return a mask of the events of one rank for each filter in use, by name of the filter.

    ``window``: ns on the rank's clock.
    """
    masks: dict[str, MaskArray] = {}
    if step is not None:
        masks["step"] = np.zeros(trace.events.height, dtype=np.bool_)
        if abs(step) < _MAX_NS:  # no column holds another
            masks["step"] = (trace.events["step"] == step).fill_null(False).to_numpy()
    if names:
        masks["name"] = _match_names(trace, names)
    if categories:
        masks["category"] = _match_categories(trace, categories)
    if window is not None:
        masks["time"] = _is_within(trace.events["ts"], window)
    return masks


def _select_rank_part(
    trace: Trace, selected: MaskArray, masks: dict[str, MaskArray], window: TimeRange
) -> Trace:
    """Return the selected events of one rank with their tables, and step annotations where needed.

    Under filters by name or category, the step annotations that pass the other filters stay.
    """
    if "name" in masks or "category" in masks:
        others = [mask for filter_name, mask in masks.items() if filter_name in ("step", "time")]
        steps = _is_step_annotation(trace.events, trace.meta.get("step_name"))
        selected = selected | np.logical_and.reduce([steps, *others])
    part = keep_events(trace, selected)
    rest = {
        name: part.table(name).filter(pl.Series(_is_within(part.table(name)["ts"], window)))
        for name in ("memory", "counters", "flows")
        if name in part.tables
    }
    return part.replace(None, **rest) if rest else part


def keep_events(trace: Trace, keep: MaskArray) -> Trace:
    """Return a trace reduced to the events in the mask ``keep`` and to the rows of other tables that describe them."""
    tables = {name: _filter_table(trace, name, keep) for name in trace.tables if name != "events"}
    return Trace({**tables, "events": _filter_events(trace.events, keep)}, trace.meta)


def drop_captured_events(trace: Trace) -> Trace:
    """Return a trace without the captured events of device graphs, which other tools' formats cannot represent."""
    captured = kinds.mask_events(trace.events, kinds.CAPTURED)
    return keep_events(trace, ~captured) if captured.any() else trace


def _is_within(times: pl.Series, window: TimeRange) -> MaskArray:
    inside = np.ones(len(times), dtype=np.bool_)
    start, end = window
    if start is not None:
        inside &= (times >= start).fill_null(False).to_numpy()
    if end is not None:
        inside &= (times < end).fill_null(False).to_numpy()
    return inside


def _match_names(trace: Trace, globs: Collection[str]) -> MaskArray:
    events = trace.events
    texts = events["name"].unique().drop_nulls().cast(pl.String)
    keep = is_in(events["name"], {text for text in texts if any(fnmatchcase(text, glob) for glob in globs)})
    keep = find_nearest_ancestor(rows_of_ids(events, events["parent"]), keep, np.arange(events.height)) >= 0
    device = rows_of_ids(events, trace.launches["device_event"])
    for column in ("launch", "operator"):
        above = rows_of_ids(events, trace.launches[column])
        below = device[(above >= 0) & keep[above] & (device >= 0)]
        keep[below] = True
    return _add_launch_calls(trace, keep)


def _match_categories(trace: Trace, categories: Collection[str]) -> MaskArray:
    events = trace.events
    keep = kinds.mask_events(events, categories)
    return _add_launch_calls(
        trace, keep | is_in(kinds.add_kernel_type(events)["kind"], set(categories) & set(kinds.KERNEL_TYPES))
    )


def _add_launch_calls(trace: Trace, keep: MaskArray) -> MaskArray:
    """Add the launch calls of selected GPU activity to a mask of events."""
    device, call = (
        rows_of_ids(trace.events, trace.launches[column]) for column in ("device_event", "launch")
    )
    keep[call[(device >= 0) & keep[device] & (call >= 0)]] = True
    return keep


def _add_captured_events(trace: Trace, keep: MaskArray) -> MaskArray:
    """Add to a mask of events the captured calls that selected GPU activity replays, and their operators."""
    events = trace.events
    device, call = (rows_of_ids(events, trace.launches[column]) for column in ("device_event", "captured"))
    climbing = np.unique(call[(device >= 0) & keep[device] & (call >= 0)])
    if not climbing.size:
        return keep
    keep, parent = keep.copy(), rows_of_ids(events, events["parent"])
    while climbing.size:
        keep[climbing] = True
        climbing = np.unique(parent[climbing])
        climbing = climbing[climbing >= 0]
    return keep


def _is_step_annotation(events: pl.DataFrame, step_name: str | None) -> MaskArray:
    """Return a mask of the events that mark steps."""
    mask = np.zeros(events.height, dtype=np.bool_)
    mask[find_step_events(events, step_name)["row"].to_numpy()] = True
    return mask


def _filter_events(events: pl.DataFrame, keep: MaskArray) -> pl.DataFrame:
    """Return the selected events; the parent becomes the nearest selected ancestor, the depth is recomputed."""
    if keep.all():
        return events
    parent = rows_of_ids(events, events["parent"])
    around = np.where(parent < 0, -1, find_nearest_ancestor(parent, keep, np.maximum(parent, 0)))
    depth = to_array(events["depth"], -1).astype(np.int64)
    level = np.where(depth < 0, -1, 0)
    by_depth = np.argsort(depth, kind="stable")
    for rows in np.split(by_depth, np.flatnonzero(np.diff(depth[by_depth])) + 1):
        nested = rows[(around[rows] >= 0) & (depth[rows] >= 0)]
        level[nested] = level[around[nested]] + 1
    ids = events["id"][np.maximum(around, 0)].set(pl.Series(around < 0), None)
    return events.with_columns(
        ids.alias("parent"), pl.Series("depth", level.astype(np.int16)).set(pl.Series(level < 0), None)
    ).filter(pl.Series(keep))


def _filter_table(trace: Trace, name: str, keep: MaskArray) -> pl.DataFrame:
    """Return a table without the rows that describe dropped events; optional references to them become null."""
    frame, events = trace.table(name), trace.events
    for column in TABLES[name].columns:
        if column.refers != "events":
            continue
        row = rows_of_ids(events, frame[column.name])
        is_dropped = (row < 0) | ~keep[row] if keep.size else np.ones(row.size, dtype=np.bool_)
        is_dropped &= frame[column.name].is_not_null().to_numpy()
        if (name, column.name) in _OPTIONAL_REFERENCES:
            frame = frame.with_columns(frame[column.name].set(pl.Series(is_dropped), None))
        else:
            frame = frame.filter(pl.Series(~is_dropped))
    return frame
