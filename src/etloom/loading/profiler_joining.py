"""Join the recordings of one process by different profilers, such as Kineto's operators and unitrace's kernels.

The recording with the operators is the reference: it keeps its clock, operators, annotations and Python frames. GPU
activity and the calls of the runtime and the driver come from the other recording, moved to that clock (see
`clock_fit`), as far as the reference reaches; the reference's own are dropped there, because both are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.arrays import to_series
from etloom.core.errors import LinkError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.linker.selection import keep_events
from etloom.loading.clock_fit import TOLERANCE_NS, ClockFit, fit_by_name, fit_by_time
from etloom.loading.part_joining import concat_traces, get_recorder, name_files

_PROFILERS = frozenset({"ascend", "kineto", "nsys", "perfetto", "rocprof"})
"""Formats that time calls and GPU activity; a memory snapshot, for example, has annotations only."""
_SYNCHRONIZATIONS = frozenset({"cuda_sync"})
_NAMED = categories.OPERATOR_CATEGORIES | categories.ANNOTATION_CATEGORIES
_BASE_NAME = r"^(?:void +)?([^(<\[]*[^(<\[ ])"
"""The part of a name that profilers agree on: without parameters, and without the geometry that unitrace adds."""
_FORWARD_ARROWS = "fwdbwd"


def join_profilers(traces: Sequence[Trace], *, strict: bool = False) -> list[Trace]:
    """Join the traces of a rank that different profilers recorded; return all its traces.

    A trace whose clock cannot be fitted is left out, and counted.

    Args:
        traces: The traces of one rank.
        strict: Raise instead of leaving a trace out.

    Raises:
        LinkError: A clock cannot be fitted, and ``strict``.
    """
    timed = [trace for trace in traces if _is_profile(trace)]
    if len({get_recorder(trace) for trace in timed}) < 2:
        return list(traces)
    reference, *others = sorted(timed, key=_count_operators, reverse=True)
    joined = reference
    for other in others:
        if get_recorder(other) == get_recorder(reference):
            continue
        if (fit := _fit_clock(reference, other)) is not None:
            joined = _join(joined, other, fit)
            continue
        reason = (
            f"the recording of {get_recorder(other)} does not fit that of {get_recorder(reference)}: too few "
            "events or launch calls agree in name, order and time, or several clock offsets fit equally well"
        )
        if strict:
            remedy = "record both at the same time, in one process, with calls of the runtime"
            raise LinkError(reason, where=name_files(other), remedy=remedy)
        joined = joined.count("job.profilers_not_joined", 1, f"{name_files(other)}: {reason}", "data_loss")
    recorders = {get_recorder(other) for other in others} - {get_recorder(reference)}
    rest = [
        trace
        for trace in traces
        if trace is not reference and not (_is_profile(trace) and get_recorder(trace) in recorders)
    ]
    return [*rest, joined]


def _is_profile(trace: Trace) -> bool:
    is_profiler = not _PROFILERS.isdisjoint(trace.meta.get("formats", ()))
    return is_profiler and trace.events.height > 0 and not trace.nodes.height


def _count_operators(trace: Trace) -> int:
    return int(categories.mask_events(trace.events, categories.OPERATOR_CATEGORIES).sum())


def _fit_clock(reference: Trace, other: Trace) -> ClockFit | None:
    share_epoch = all(trace.meta.get("clock") == "epoch" for trace in (reference, other))
    fit = fit_by_name(*(_list_named(trace) for trace in (reference, other)), share_epoch=share_epoch)
    return fit or fit_by_time(_list_leaves(reference), _list_launches(other), share_epoch=share_epoch)


def _select(trace: Trace, members: Collection[str]) -> pl.DataFrame:
    """Return the events of categories."""
    return trace.events.filter(to_series(categories.mask_events(trace.events, members)))


def _list_named(trace: Trace) -> pl.DataFrame:
    """Return time and key of the events that several profilers may record: calls, GPU activities and annotations."""
    sides = {
        "call": categories.RUNTIME_CATEGORIES,
        "activity": categories.DEVICE_CATEGORIES,
        "range": _NAMED,
    }
    parts = [
        _select(trace, members).select(
            key=pl.lit(f"{side} ") + pl.col("name").cast(pl.String).str.extract(_BASE_NAME), ts="ts"
        )
        for side, members in sides.items()
    ]
    return pl.concat(parts).drop_nulls()


def _list_leaves(trace: Trace) -> pl.DataFrame:
    """Return tid, ts and end of the operators that contain no other one."""
    operators = _select(trace, categories.OPERATOR_CATEGORIES).filter(pl.col("dur") > 0)
    rows = operators.select("tid", "ts", end=pl.col("ts") + pl.col("dur")).sort("tid", "ts", "end")
    following = pl.col("ts").shift(-1).over("tid")
    return rows.filter((following >= pl.col("end")).fill_null(True))


def _list_launches(trace: Trace) -> pl.DataFrame:
    """Return tid and ts of the calls that launched GPU activity, as far as ids say which; else of all calls."""
    calls = _select(trace, categories.RUNTIME_CATEGORIES)
    activity = _select(trace, categories.DEVICE_CATEGORIES)
    launches = calls.join(activity.drop_nulls("correlation"), on="correlation", how="semi")
    return (launches if launches.height else calls).select("tid", "ts")


def _join(reference: Trace, other: Trace, fit: ClockFit) -> Trace:
    other = _move(other, fit)
    start, end = _get_extent(reference)
    first, last = _get_extent(other)
    events = reference.events
    replaced = _list_replaced(other)
    covered = events["ts"].is_between(first - TOLERANCE_NS, last + TOLERANCE_NS).to_numpy()
    dropped = categories.mask_events(events, replaced) & covered
    host = keep_events(reference, ~dropped)
    part = keep_events(other, _select_events(reference, other, start, end))
    excluded = other.events.height - part.events.height
    host, part = _separate_ids(host, part)
    joined = concat_traces([host, part])
    formats = [*reference.meta.get("formats", ()), *other.meta.get("formats", ())]
    meta = {"formats": formats, "profiler_join": {"how": fit.how, "share": fit.share, "offset_ns": fit.line.offset,
            "drift": fit.line.drift, "residual_ns": fit.residual_ns[0]}}  # fmt: skip
    recorders = f"{get_recorder(other)} with {get_recorder(reference)}"
    outside = f"events of {get_recorder(other)} outside of the time that {get_recorder(reference)} recorded"
    return joined.replace(meta=meta).with_stats(
        [
            Stat("job.profilers_joined", "info", fit.events, f"{recorders}: {fit.describe()}"),
            Stat("job.outside_other_recording", "info", excluded, outside),
        ]
    )


def _list_replaced(other: Trace) -> set[str]:
    """Return the categories that the other recording replaces: of calls, of GPU activity, or of both."""
    recorded = set(other.events["cat"].cast(pl.String).unique())
    sides = (categories.RUNTIME_CATEGORIES, categories.DEVICE_CATEGORIES | _SYNCHRONIZATIONS)
    return set().union(*(side for side in sides if side & recorded))


def _move(trace: Trace, fit: ClockFit) -> Trace:
    """Move the times of a trace to the clock of the reference."""
    tables = {
        name: trace.table(name).with_columns(ts=fit.line.convert(pl.col("ts")))
        for name in ("events", "flows", "memory", "counters")
        if name in trace.tables and trace.table(name).height
    }
    return trace.replace(None, **tables)


def _get_extent(trace: Trace) -> tuple[int, int]:
    start, end = categories.recorded_extent()
    first, last = trace.events.select(start=pl.coalesce(start, 0), end=pl.coalesce(end, 0)).row(0)
    return int(first), int(last)


def _select_events(reference: Trace, other: Trace, start: int, end: int) -> np.ndarray:
    """Return a mask of the events of the other recording: in the time of the reference, with what its calls launched.

    Operators and annotations that the reference has too are left out.
    """
    events = other.events
    inside = events["ts"].is_between(start, end)
    calls = categories.mask_events(events, categories.RUNTIME_CATEGORIES)
    launched = events.filter(to_series(calls) & inside)["correlation"].drop_nulls().unique()
    inside = inside | events["correlation"].is_in(launched.implode()).fill_null(False)
    named = categories.mask_events(events, _NAMED)
    repeated = (
        events["name"].cast(pl.String).is_in(reference.events["name"].cast(pl.String).unique().implode())
    )
    mask: np.ndarray = inside.to_numpy() & ~(named & repeated.fill_null(False).to_numpy())
    return mask


def _separate_ids(host: Trace, part: Trace) -> tuple[Trace, Trace]:
    """Let correlations, processes and tracks of two recordings not meet by chance.

    The host events of the other recording are of the process of the reference, whatever a container calls it.
    """
    highest = int(host.events["correlation"].max() or 0)  # type: ignore[arg-type]
    operators = _select(host, categories.OPERATOR_CATEGORIES)
    processes = operators["pid"].value_counts(sort=True)["pid"]
    on_host = to_series(categories.mask_events(part.events, categories.HOST_CATEGORIES))
    pids = part.events.filter(on_host)["pid"].unique()
    events = part.events.with_columns(pl.col("correlation") + highest)
    tables = {"events": events}
    if processes.len() and pids.len() == 1 and pids[0] not in processes.to_list():
        moved = pl.when(pl.col("pid") == pids[0]).then(pl.lit(processes[0])).otherwise("pid").alias("pid")
        tables = {
            name: (events if name == "events" else part.table(name)).with_columns(moved)
            for name in ("events", "flows", "memory", "threads")
            if part.table(name).height
        }
    threads = tables.get("threads", part.table("threads"))
    tables["threads"] = threads.join(host.threads, on=["pid", "tid"], how="anti", nulls_equal=True)
    syncs = part.syncs.with_columns(pl.col("record_correlation") + highest)
    # Arrows of the reference lead to its own GPU activity.
    flows = host.flows.filter(pl.col("cat").cast(pl.String) == _FORWARD_ARROWS)
    return host.replace(flows=flows), part.replace(None, syncs=syncs, **tables)
