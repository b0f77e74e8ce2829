"""Join GPU activity with its launch call, with the operator around that call, and with its communication.

A launch is any call that shares a correlation, or else an External id, with GPU activity. There is no list of API
names, so memsets, peer copies, cooperative, graph and driver launches of any vendor are all recognized.

NCCL wraps its launches in a record_param_comms operator, which both tracers describe. Everything launched directly
inside a described operator is GPU activity of that communication, whatever its name (on one rank NCCL copies).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

import numpy as np
import polars as pl

from etloom._native import number_pairs
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.nesting import find_innermost
from etloom.core.schema import TABLES, Stat
from etloom.core.steps import NUMBERED_STEP_PATTERN
from etloom.core.trace import Trace
from etloom.linker.placement import format_example, get_ids

_FACT_COLUMNS = [name for name in TABLES["comms"].schema if name not in ("id", "node", "event")]


_MIN_AGREEMENT = 0.9
"""Least share of calls inside the operator that their External id names, among those whose External id names one."""
_SEARCH_ORDER: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
"""Directions in which a call of a repeated correlation is searched; the later one prevails."""


def join_launches(trace: Trace) -> Trace:
    """Return the Trace with the table `launches`, and with the steps of GPU activity and synchronization events."""
    events = trace.events
    work = np.flatnonzero(categories.mask_events(events, categories.DEVICE_CATEGORIES))
    if not work.size:
        return trace.replace(launches=trace.table("launches").clear(), events=_add_device_steps(events, None))
    process = encode_processes(events, work)
    call, repeated = find_calls(events, work, process)
    call, around, without_ids = _find_operators(trace, work, call)
    launches = pl.DataFrame(
        {
            "launch": get_ids(events, call),
            "device_event": get_ids(events, work),
            "operator": get_ids(events, around),
            "captured": pl.Series([None], dtype=pl.UInt32).new_from_index(0, work.size),
        }
    )
    missing = work[(call < 0) & (around < 0)]
    unscoped = call[(call >= 0) & (around < 0)]
    several = np.flatnonzero(np.bincount(call[call >= 0]) > 1)
    graphs = several[arrays.match_text(events["name"][several], categories.GRAPH_LAUNCH)]
    idle = find_launches_without_work(events, call)
    numbers = arrays.to_array(events["correlation"], 0)
    _, highest = _number_ranges(numbers, process, work)
    late = idle[numbers[idle] > highest[process[idle]]]
    other = idle[~arrays.mask_members(idle, late)]
    cause = np.where(call >= 0, call, around)
    return trace.replace(launches=launches, events=_add_device_steps(events, (work, cause))).with_stats(
        [
            *without_ids,
            Stat("link.launch_missing", "info", missing.size, format_example(events, missing)),
            *(
                Stat(f"link.{reason}", "info", rows.size, format_example(events, rows))
                for reason, rows in classify_missing_launches(events, process, missing).items()
            ),
            Stat("link.activity_after_recording", "info", late.size, format_example(events, late)),
            Stat("link.launches_without_activity", "info", other.size, format_example(events, other)),
            Stat("link.launch_without_operator", "info", unscoped.size, format_example(events, unscoped)),
            Stat("link.graph_launches", "info", graphs.size, format_example(events, graphs)),
            Stat(
                "link.repeated_correlations",
                "info",
                repeated,
                "shared by several calls; the latest one before the GPU activity is used",
            ),
            *([_count_shared_correlations(events, process, work, call)] if repeated else []),
        ]
    )


def _find_operators(
    trace: Trace, work: np.ndarray, call: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[Stat]]:
    """Return the row of the call and of the operator of each device event, -1 for none, and how many lacked ids.

    The operator is the one around the call, else the one with the event's External id. Without ids both are at the
    start of the file's arrows; without arrows calls and events are paired by order.

    Args:
        trace: The trace, with placed events.
        work: Rows of device events.
        call: Row of the call that shares an id with each, -1 for none.
    """
    events = trace.events
    stats: list[Stat] = []
    arrow_call, arrow_operator = find_by_arrows(trace, work, call < 0)
    if (arrow_call >= 0).any():
        stats.append(Stat("link.launches_by_arrow", "info", *_count_linked(events, work, arrow_call)))
        call = np.where(call >= 0, call, arrow_call)
    if (call < 0).all() and (ordered := find_by_order(events, work)).max() >= 0:
        stats.append(Stat("link.launches_by_order", "info", *_count_linked(events, work, ordered)))
        call = ordered
    around = np.where(call >= 0, find_enclosing_operator(events, call), _operators_from_file(trace, work))
    if (around < 0).any():
        around = np.where(around >= 0, around, _find_operators_by_id(events, work, call))
        around = np.where(around >= 0, around, arrow_operator)
        around = np.where(around >= 0, around, find_thread_operators(events, call))
    return call, around, stats


def _count_linked(events: pl.DataFrame, work: np.ndarray, call: np.ndarray) -> tuple[int, str | None]:
    rows = work[call >= 0]
    return rows.size, format_example(events, rows)


def _count_shared_correlations(
    events: pl.DataFrame, process: np.ndarray, work: np.ndarray, call: np.ndarray
) -> Stat:
    """Count the GPU activities whose correlation is used by calls of several processes.

    As in two traces merged into one file. Activities whose External id identifies the call do not count.
    """
    external = arrays.to_array(events["external_id"], 0)
    work = work[(external[work] <= 0) | (external[work] != external[call])]
    ids = events.select("correlation", "cat", pid=pl.col("pid").fill_null(0)).with_columns(
        process=pl.Series(process)
    )
    keys = ["process", "correlation"]
    is_call = pl.Series(categories.mask_events(events, categories.RUNTIME_CATEGORIES))
    calls = ids.filter(is_call & (pl.col("correlation") > 0)).group_by(keys).agg(pl.col("pid").n_unique())
    shared = ids[work].join(calls.filter(pl.col("pid") > 1), on=keys, how="semi").height
    example = "each may be linked to a call of the other process"
    return Stat("link.shared_correlations", "error", shared, example)


def _operators_from_file(trace: Trace, work: np.ndarray) -> np.ndarray:
    """Return the row of the operator that the file (ET+) states for each GPU activity; -1 for none."""
    operator = np.full(trace.events.height + 1, -1)  # the last for -1
    named = trace.launches.drop_nulls("operator")
    operator[rows_of_ids(trace.events, named["device_event"])] = rows_of_ids(trace.events, named["operator"])
    rows: np.ndarray = operator[work]
    return rows


def find_calls(
    events: pl.DataFrame, rows: np.ndarray, process: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Return the row of the host call of each device event (-1 for none), and how many calls repeat a correlation.

    A call and its device events share the correlation. Calls that repeat one are distinguished by the External id if
    it is theirs alone; else the last call that starts before the device event is taken, or the first one after it.
    Without a correlation (ROCm) the External id of a single call is the key. All of these count within a process: if
    several processes launch and the device events have their pids, both must agree.

    Args:
        events: The table ``events``.
        rows: Rows of device events.
        process: The process number of each event, if `encode_processes` has been called.
    """
    process = encode_processes(events, rows) if process is None else process
    numbers, external = (arrays.to_array(events[name], 0) for name in ("correlation", "external_id"))
    hosts = np.flatnonzero(categories.mask_events(events, categories.HOST_CATEGORIES) & (numbers > 0))
    call, repeated = _find_only_calls(process, numbers, hosts, rows)
    if repeated:
        ids = {"process": process, "correlation": numbers, "external_id": external}
        table = pl.DataFrame({**ids, "row": np.arange(events.height)}).with_columns(events["ts"])
        unmatched = table[rows].drop("row").with_columns(at=pl.int_range(pl.len()))
        ambiguous = unmatched.filter(pl.Series(call < 0), pl.col("correlation") > 0)
        for pairs in _join_repeated(ambiguous, table[hosts]):
            call[pairs["at"].to_numpy()] = pairs["row"].to_numpy()
    unnumbered = np.flatnonzero((call < 0) & (external[rows] > 0))
    if unnumbered.size:
        calls = np.flatnonzero(categories.mask_events(events, categories.RUNTIME_CATEGORIES) & (external > 0))
        other, _ = _find_only_calls(process, external, calls, rows[unnumbered])
        accepted = (other >= 0) & ((numbers[rows[unnumbered]] <= 0) | (numbers[other] <= 0))
        call[unnumbered[accepted]] = other[accepted]
    return call, repeated


def _find_only_calls(
    process: np.ndarray, ids: np.ndarray, calls: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return, for each device event, the row of the only call of its process with the same id, -1 for none or several.

    Also returns the number of calls that repeat an id.

    Args:
        process: The process number of each event.
        ids: An id of each event, positive for the calls.
        calls: Rows of calls.
        rows: Rows of device events.
    """
    matches = np.full(rows.size, -1, np.int64)
    repeated = 0
    for of_calls, of_rows in _group_by_process(process[calls], process[rows]):
        at, count = arrays.find_unique(ids[calls[of_calls]], ids[rows[of_rows]])
        matches[of_rows] = np.append(calls[of_calls], -1)[at]
        repeated += count
    return matches, repeated


def _group_by_process(
    calls: np.ndarray, rows: np.ndarray
) -> list[tuple[np.ndarray | slice, np.ndarray | slice]]:
    """Return, for each process, where its calls and its device events are in two arrays of process numbers."""
    if not calls.any() and not rows.any():
        return [(slice(None), slice(None))]
    return [(np.flatnonzero(calls == number), np.flatnonzero(rows == number)) for number in np.unique(calls)]


def _join_repeated(unmatched: pl.DataFrame, calls: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield pairs (at, row) of device events and calls that share a repeated correlation; later pairs prevail.

    By time these are the first call after the device event, then the last one before it; last the only call with its
    External id.
    """
    keys = ["process", "correlation", "external_id"]
    for strategy in _SEARCH_ORDER:
        yield (
            unmatched.sort("ts")
            .join_asof(calls.sort("ts"), on="ts", by=keys[:2], strategy=strategy, check_sortedness=False)
            .drop_nulls("row")
        )
    named = calls.filter(pl.col("external_id") > 0).unique(keys, keep="none")
    yield unmatched.join(named, on=keys, how="inner")


def encode_processes(events: pl.DataFrame, work: np.ndarray) -> np.ndarray:
    """Return a process number for each event if correlations are numbered per process; otherwise all 0.

    That is the case if several processes launch, these rows, device events, have their pids, and most of the device
    events whose correlation a call has are of the process of such a call. Other recorders (MTIA, HPU) give device
    events a pid that merely some host events share.
    """
    pids, numbers = (arrays.to_array(events[name], 0) for name in ("pid", "correlation"))
    calls = np.flatnonzero(categories.mask_events(events, categories.HOST_CATEGORIES) & (numbers > 0))
    launching, _, _ = arrays.find_values(pids[calls])
    if launching.size >= 2 and arrays.mask_members(pids[work], launching).all():
        same_number = work[arrays.mask_members(numbers[work], numbers[calls])]
        pairs = number_pairs(pids[(rows := np.append(same_number, calls))], numbers[rows])
        same_process = arrays.mask_members(pairs[: same_number.size], pairs[same_number.size :])
        if 2 * np.count_nonzero(same_process) >= same_number.size:
            return np.unique(pids, return_inverse=True)[1]
    return np.zeros(events.height, np.int64)


def classify_missing_launches(
    events: pl.DataFrame, process: np.ndarray, missing: np.ndarray
) -> dict[str, np.ndarray]:
    """Group GPU activities without a launch call by the reason for the missing call; return {reason: rows}.

    A process numbers its calls upwards. So GPU activity with a lower number than all recorded calls of its process
    was launched_before_recording (the host runs ahead of the device), with a higher one launched_after_recording;
    otherwise the recorder lost the call: launch_not_recorded. without_correlation: it or no call has a number.
    no_calls_recorded: the recording holds the device side only.

    Args:
        events: The table ``events``.
        process: The process number of each event (`encode_processes`).
        missing: Rows of GPU activity without a launch call.
    """
    correlation = arrays.to_array(events["correlation"], 0)
    calls = np.flatnonzero(categories.mask_events(events, categories.RUNTIME_CATEGORIES) & (correlation > 0))
    if not calls.size:
        unnumbered = categories.mask_events(events, categories.RUNTIME_CATEGORIES).any()
        return {"without_correlation" if unnumbered else "no_calls_recorded": missing}
    lowest, highest = _number_ranges(correlation, process, calls)
    numbers, missing_process = correlation[missing], process[missing]
    before, after = numbers < lowest[missing_process], numbers > highest[missing_process]
    return {
        "without_correlation": missing[numbers <= 0],
        "launched_before_recording": missing[before & (numbers > 0)],
        "launched_after_recording": missing[after],
        "launch_not_recorded": missing[~before & ~after],
    }


def _number_ranges(numbers: np.ndarray, group: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and highest correlation of the rows in each group; an unlimited range for empty groups."""
    size = int(group.max(initial=0)) + 1
    lowest, highest = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
    if size == 1:
        lowest[0], highest[0] = numbers[rows].min(initial=lowest[0]), numbers[rows].max(initial=-1)
    else:
        np.minimum.at(lowest, group[rows], numbers[rows])
        np.maximum.at(highest, group[rows], numbers[rows])
    none = highest < 0
    lowest[none], highest[none] = 0, np.iinfo(np.int64).max
    return lowest, highest


def find_launches_without_work(events: pl.DataFrame, call: np.ndarray) -> np.ndarray:
    """Return the rows of launch calls without GPU activity.

    Launch calls are those whose name launches activity elsewhere in the trace.
    """
    used = call[call >= 0]
    is_call = categories.mask_events(events, categories.RUNTIME_CATEGORIES)
    unused = is_call & (arrays.to_array(events["correlation"], 0) > 0)
    unused[used] = False
    idle = np.flatnonzero(unused)
    launching = arrays.take_rows(events["name"], used).unique().drop_nulls()
    rows: np.ndarray = idle[arrays.is_in(arrays.take_rows(events["name"], idle), launching.to_list())]
    return rows


def find_enclosing_operator(events: pl.DataFrame, rows: np.ndarray) -> np.ndarray:
    """Return the row of the innermost operator that encloses each host event; -1 for none.

    Annotations, and so steps, are not operators.
    """
    parent = rows_of_ids(events, events["parent"])
    outer = arrays.select_values(parent, rows)
    operators = categories.mask_events(events, categories.OPERATOR_CATEGORIES)
    return nesting.find_nearest_ancestor(parent, operators, outer)


def _find_operators_by_id(events: pl.DataFrame, work: np.ndarray, call: np.ndarray) -> np.ndarray:
    """Return the row of the operator with the same External id for each GPU activity; -1 for none.

    The External id of the call is used, else that of the activity.

    In some files External ids name operators, in others they are unrelated numbers. They are used if most operators
    around calls have the id of the call, or, if no such operator has an id, unless they equal the correlation.
    """
    ids = arrays.to_array(events["external_id"], 0)
    activity_ids = np.where((call >= 0) & (ids[call] > 0), ids[call], ids[work])
    numbered = np.flatnonzero(categories.mask_events(events, categories.OPERATOR_CATEGORIES) & (ids > 0))
    operators = arrays.make_frame({"row": numbered, "id": ids[numbered]}).unique("id", keep="none")
    operator_rows = np.append(operators["row"].to_numpy(), -1)

    def look_up(numbers: np.ndarray) -> np.ndarray:
        rows: np.ndarray = operator_rows[rows_of_ids(operators, arrays.to_series(numbers))]
        return rows

    none = np.full(len(work), -1, np.int64)
    calls = np.flatnonzero(categories.mask_events(events, categories.RUNTIME_CATEGORIES) & (ids > 0))
    around = find_enclosing_operator(events, calls)
    stated = look_up(ids[calls])
    known, agreed = (around >= 0) & (stated >= 0), stated == around
    if known.any() and agreed[known].mean() < _MIN_AGREEMENT:
        return none
    correlations = arrays.to_array(events["correlation"], 0)
    if not known.any() and ((correlations[work] == activity_ids) & (activity_ids > 0)).any():
        return none
    return look_up(activity_ids)


def _add_device_steps(events: pl.DataFrame, launched: tuple[np.ndarray, np.ndarray] | None) -> pl.DataFrame:
    """Return events with the step of device-side rows: that of their launch, call or annotation.

    ``launched``: rows of GPU activity, and the row of the launch call or operator of each (-1 for none).
    """
    step = arrays.to_array(events["step"], 0).copy()
    has_step = arrays.is_present(events["step"]).copy()
    caused = [] if launched is None else [launched]
    syncs = np.flatnonzero(categories.mask_events(events, ("cuda_sync",)))
    if syncs.size:
        caused.append((syncs, find_calls(events, syncs)[0]))
    ranges = np.flatnonzero(categories.mask_events(events, ("gpu_user_annotation",)))
    if ranges.size:
        caused.append((ranges, _find_host_annotations(events, ranges)))
    for rows, cause in caused:
        ok = (cause >= 0) & has_step[cause]
        step[rows[ok]] = step[cause[ok]]
        has_step[rows[ok]] = True
    _add_steps_of_devices(events, step, has_step)
    return events.with_columns(arrays.to_series(step, "step").set(arrays.to_series(~has_step), None))


def _add_steps_of_devices(events: pl.DataFrame, step: np.ndarray, has_step: np.ndarray) -> None:
    """Assign steps, in place, to events of devices (TPU) that record step annotations but no launches."""
    is_annotation = categories.mask_events(events, (*categories.ANNOTATION_CATEGORIES, "gpu_user_annotation"))
    annotations = np.flatnonzero(categories.match_names(events, NUMBERED_STEP_PATTERN, is_annotation))
    if not annotations.size:
        return
    number = pl.col("name").cast(pl.String).str.extract(NUMBERED_STEP_PATTERN).cast(pl.Int64, strict=False)
    steps = (
        events.select("device", "name", "ts", "dur")[annotations]
        .select("device", "ts", end=pl.col("ts") + pl.col("dur"), step=number)
        .drop_nulls()
    )
    for (device,), marks in steps.group_by("device"):
        rows = np.flatnonzero((events["device"] == device).fill_null(False).to_numpy() & ~has_step)
        at = find_innermost(marks["ts"], marks["end"], events["ts"].to_numpy()[rows])
        inside = rows[at >= 0]
        step[inside] = marks["step"].to_numpy()[at[at >= 0]]
        has_step[inside] = True


def _find_host_annotations(events: pl.DataFrame, ranges: np.ndarray) -> np.ndarray:
    """Return the row of the host annotation of each device annotation, by External id and name; -1 for none."""
    hosts = np.flatnonzero(categories.mask_events(events, categories.ANNOTATION_CATEGORIES))
    keys = ["external_id", "name"]
    host = arrays.take_rows(events.select(keys), hosts).with_columns(arrays.to_series(hosts, "cause"))
    host = host.unique(keys, keep="first", maintain_order=True)
    joined = arrays.take_rows(events.select(keys), ranges).join(
        host, on=keys, how="left", maintain_order="left"
    )
    return arrays.to_array(joined["cause"], -1)


def join_comms(trace: Trace) -> Trace:
    """Return the Trace with the communication records of execution trace and profile merged: per call and device event.

    They are rows of `comms`.
    """
    comms = trace.comms
    if not comms.height:
        return trace
    # Where a file has a node for device work too, its communication is still that of the call.
    device = trace.launches.select(event="device_event")
    links = trace.links.select("node", "event").join(device, on="event", how="anti")
    calls = comms.filter(pl.col("event").is_not_null()).drop("node").join(links, on="event", how="left")
    # Of a trace that was linked before, a node's row may be that of another iteration: what it says is the node's.
    recorded = (
        comms.drop_nulls("node")
        .sort(pl.col("event").is_not_null(), maintain_order=True)
        .unique("node", keep="first", maintain_order=True)
        .drop("event")
        .join(links, on="node", how="left")
    )
    alone = recorded.filter(pl.col("event").is_null())
    with_event = _merge_by_event(pl.concat([calls, recorded.drop_nulls("event")], how="diagonal_relaxed"))
    with_event = pl.concat([with_event, _select_device_rows(trace, with_event)], how="diagonal_relaxed")
    with_event = _merge_by_event(with_event).sort("event")
    comms_table = pl.concat([with_event, alone], how="diagonal_relaxed").drop("id", strict=False)
    comms_table = comms_table.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("id"), pl.all())
    example = alone["collective"][0] if alone.height else None
    return trace.replace(comms=comms_table).with_stats(
        [Stat("link.comms_without_event", "info", alone.height, example)]
    )


def _select_device_rows(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Return a `comms` row for each device event that a communication call launched, with the call's values."""
    caused = trace.launches.drop_nulls("operator").select("operator", "device_event")
    return (
        calls.join(caused, left_on="event", right_on="operator")
        .drop("event")
        .rename({"device_event": "event"})
    )


def _merge_by_event(rows: pl.DataFrame) -> pl.DataFrame:
    """Merge `comms` rows of one event into one row, with the first non-null value of each column."""
    if rows["event"].is_unique().all():
        return rows
    facts = [pl.col(name).drop_nulls().first() for name in ("node", *_FACT_COLUMNS)]
    return rows.group_by("event", maintain_order=True).agg(facts)


def find_device_communication(trace: Trace) -> pl.DataFrame:
    """Return the device events that are communication by name: id, and ``known`` (has a row in `comms`)."""
    on_device = np.flatnonzero(categories.mask_events(trace.events, categories.DEVICE_CATEGORIES))
    work = arrays.take_rows(trace.events.select("id", "cat", "name"), on_device)
    return (
        categories.add_kernel_type(work)
        .filter(pl.col("kind") == "communication")
        .select("id", pl.col("id").is_in(trace.comms["event"].drop_nulls().implode()).alias("known"))
    )


# Finds the launch call of GPU activity that shares no id with one: by the file's arrows, else by order in time.

_TRACK = ["pid", "tid"]
_ROUNDING_NS = 1000
_ARROW = ["cat", "flow"]
_ENDS = ["at", "pid_start", "tid_start", "start_ts"]
_LAUNCHING_CALLS = (
    (("kernel", "Kernel"), r"(?i)launch|enqueue_?kernel|enqueuendrange"),
    (categories.MEMCPY_CATEGORIES, r"(?i)mem_?cpy|mem(?:ory)?_?copy|mem(?:ory)?buffer(?:read|write|copy)"),
    (categories.MEMSET_CATEGORIES, r"(?i)mem_?set|fill"),
)
"""Categories of activities, and a pattern of the names of the calls that launch them."""


def find_by_arrows(trace: Trace, work: np.ndarray, is_unlinked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Follow the file's arrows (flow events) back from device events.

    An arrow that ends where a device event begins is from its launch, and starts in the innermost host event there.
    Others, which end inside a device event, are from synchronizations.

    Args:
        trace: The trace, with placed events.
        work: Rows of device events.
        is_unlinked: Mask of those to look at.

    Returns:
        The row of the call, and of the operator, from which an arrow leads to each device event; -1 for none.
    """
    none = np.full(work.size, -1, np.int64)
    places = np.flatnonzero(is_unlinked)
    if not places.size or not trace.rows("flows"):
        return none, none
    events = trace.events
    flows = trace.flows.with_columns(pl.col("cat").cast(pl.String).fill_null("")).sort("ts")
    begins = events.select(*_TRACK, "ts")[work[places]].with_columns(at=pl.Series(places)).sort("ts")
    ends = flows.filter(pl.col("ph") == "f")
    heads = ends.join_asof(begins, on="ts", by=_TRACK, tolerance=_ROUNDING_NS, check_sortedness=False)
    heads = heads.drop_nulls("at")
    tails = flows.filter(pl.col("ph") == "s").select(*_ARROW, *_TRACK, "ts", start_ts="ts")
    before = heads.join_asof(tails, on="ts", by=_ARROW, suffix="_start", check_sortedness=False)
    other = before.filter(pl.col("start_ts").is_null()).select(heads.columns)
    only = other.join(tails.unique(_ARROW, keep="none"), on=_ARROW, suffix="_start", nulls_equal=True)
    arrows = pl.concat([before.drop_nulls("start_ts").select(_ENDS), only.select(_ENDS)])
    starts = arrows.rename({"pid_start": "pid", "tid_start": "tid", "start_ts": "ts"}).sort("ts")
    hosts = np.flatnonzero(_mask_placed(events, categories.HOST_CATEGORIES))
    sources = _find_innermost(events, starts, hosts, _TRACK)
    sources_by_kind = []
    for kinds in (categories.RUNTIME_CATEGORIES, categories.OPERATOR_CATEGORIES):
        rows = none.copy()
        is_kind = arrays.select_values(categories.mask_events(events, kinds), sources, False)
        rows[starts["at"].to_numpy()[is_kind]] = sources[is_kind]
        sources_by_kind.append(rows)
    return sources_by_kind[0], sources_by_kind[1]


def _find_innermost(
    events: pl.DataFrame, points: pl.DataFrame, rows: np.ndarray, track: list[str]
) -> np.ndarray:
    """Return the row of the innermost host event around each point of a track; -1 for none.

    Args:
        events: The table ``events``, placed.
        points: The columns ``track`` and ts, sorted by ts.
        rows: Rows of the host events to look at, and those around them.
        track: The columns that an event and a point on one track share.
    """
    begun = events.select(*track, "ts")[rows].with_columns(row=pl.Series(rows))
    joined = points.join_asof(begun, on="ts", by=track, check_sortedness=False)
    nearest_rows = arrays.to_array(joined["row"], -1).astype(np.int64)
    ends = arrays.to_array(events["ts"], 0) + arrays.to_array(events["dur"], 0)
    parent = arrays.rows_of_ids(events, events["parent"])
    times = points["ts"].to_numpy()
    while (over := np.flatnonzero((nearest_rows >= 0) & (ends[nearest_rows] < times))).size:
        nearest_rows[over] = parent[nearest_rows[over]]
    return nearest_rows


def find_by_order(events: pl.DataFrame, work: np.ndarray) -> np.ndarray:
    """Pair device events with calls by order, where each kind of call launched on one thread for one stream.

    A stream is first in, first out. The pairs of a kind count only if there are as many calls as activities, and no
    activity begins before its call.

    Args:
        events: The table ``events``, placed.
        work: Rows of device events.

    Returns:
        The row of the call of each device event; -1 for none.
    """
    matches = np.full(work.size, -1, np.int64)
    is_call = _mask_placed(events, categories.RUNTIME_CATEGORIES)
    parent = arrays.rows_of_ids(events, events["parent"])
    starts = arrays.to_array(events["ts"], 0)
    for kinds, pattern in _LAUNCHING_CALLS:
        at = np.flatnonzero(categories.mask_events(events, kinds)[work])
        launches = is_call & categories.match_names(events, pattern)
        calls = np.flatnonzero(launches)
        calls = calls[nesting.find_nearest_ancestor(parent, launches, parent[calls]) < 0]
        if not at.size or at.size != calls.size or _count_tracks(events, calls, _TRACK) > 1:
            continue
        if (
            _count_tracks(events, work[at], ["device", "stream"]) == 1
            and (starts[calls] <= starts[work[at]]).all()
        ):
            matches[at] = calls
    return matches


def find_thread_operators(events: pl.DataFrame, calls: np.ndarray) -> np.ndarray:
    """Return the row of the innermost operator around each call in another process, if its own has no operators.

    Ascend's recorder gives the runtime a process of its own, with the numbers of the threads that called it.
    """
    matches = np.full(calls.size, -1, np.int64)
    is_operator = _mask_placed(events, categories.OPERATOR_CATEGORIES)
    operators = np.flatnonzero(is_operator)
    pids = arrays.to_array(events["pid"], -1)
    at = np.flatnonzero(calls >= 0)
    at = at[~arrays.mask_members(pids[calls[at]], pids[operators])]
    at = at[np.argsort(calls[at], kind="stable")]
    if not at.size or not operators.size:
        return matches
    owners = events.select(_TRACK)[operators].unique().filter(pl.col("tid").is_unique())
    points = events.select("tid", "ts")[calls[at]]
    operators = operators[events["tid"][operators].is_in(owners["tid"].implode()).to_numpy()]
    around = _find_innermost(events, points, operators, ["tid"])
    matches[at] = nesting.find_nearest_ancestor(
        arrays.rows_of_ids(events, events["parent"]), is_operator, around
    )
    return matches


def _mask_placed(events: pl.DataFrame, kinds: Collection[str]) -> np.ndarray:
    mask: np.ndarray = categories.mask_events(events, kinds) & arrays.is_present(events["depth"])
    return mask


def _count_tracks(events: pl.DataFrame, rows: np.ndarray, columns: list[str]) -> int:
    return events.select(columns)[rows].unique().height
