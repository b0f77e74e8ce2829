"""Join GPU activity to the call that launched it and to the operator around that call.

A launch is any call that shares a correlation with GPU activity. There is no list of API names, so memsets, peer
copies, cooperative, graph and driver launches of any vendor are all recognized.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.schema import Stat
from etloom.core.steps import match_steps
from etloom.core.trace import Trace
from etloom.linker.placement import format_example, get_ids


def join_launches(trace: Trace) -> Trace:
    """Return the Trace with `launches`, and with the steps of GPU activity, of GPU annotations and of
    synchronizations.
    """
    events = trace.events
    work = np.flatnonzero(arrays.is_in(events["cat"], categories.DEVICE_CATEGORIES))
    if not work.size:
        return trace.replace(launches=trace.table("launches").clear(), events=_add_device_steps(events, None))
    process = encode_processes(events, work)
    call, repeated = find_calls(events, work, process)
    around = np.where(call >= 0, find_enclosing_operator(events, call), _operators_from_file(trace, work))
    launches = pl.DataFrame(
        {
            "launch": get_ids(events, call),
            "device_event": get_ids(events, work),
            "operator": get_ids(events, around),
        }
    )
    missing = work[(call < 0) & (around < 0)]
    alone = call[(call >= 0) & (around < 0)]
    calls, works = np.unique(call[call >= 0], return_counts=True)
    graphs = calls[works > 1]
    idle = find_launches_without_work(events, call)
    numbers = arrays.to_array(events["correlation"], 0)
    _, highest = _number_ranges(numbers, process, work)
    late = idle[numbers[idle] > highest[process[idle]]]
    other = np.setdiff1d(idle, late)
    cause = np.where(call >= 0, call, around)
    return trace.replace(launches=launches, events=_add_device_steps(events, (work, cause))).with_stats(
        [
            Stat("link.launch_missing", "info", missing.size, format_example(events, missing)),
            *(
                Stat(f"link.{reason}", "info", rows.size, format_example(events, rows))
                for reason, rows in classify_missing_launches(events, process, missing).items()
            ),
            Stat("link.activity_after_recording", "info", late.size, format_example(events, late)),
            Stat("link.launches_without_activity", "info", other.size, format_example(events, other)),
            Stat("link.launch_without_operator", "info", alone.size, format_example(events, alone)),
            Stat("link.graph_launches", "info", graphs.size, format_example(events, graphs)),
            Stat(
                "link.repeated_correlations",
                "info",
                repeated,
                "of calls; the latest before the work is taken",
            ),
        ]
    )


def _operators_from_file(trace: Trace, work: np.ndarray) -> np.ndarray:
    """Return for rows of GPU activity the row of the operator that the file itself names (ET+), or -1."""
    operator = np.full(trace.events.height + 1, -1)  # the last for -1
    named = trace.launches.drop_nulls("operator")
    operator[rows_of_ids(trace.events, named["device_event"])] = rows_of_ids(trace.events, named["operator"])
    rows: np.ndarray = operator[work]
    return rows


def find_calls(
    events: pl.DataFrame, rows: np.ndarray, process: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Return for device events the row of the call with their correlation (or -1), and how many calls repeat one.

    Correlations are unique within a process: if several processes launch and the device events have their pids, both
    must agree. Of several calls with one correlation, the last that starts before the device event is taken, else
    the first one after it.

    Args:
        events: The table ``events``.
        rows: Rows of device events.
        process: The process number of each event, if `encode_processes` has been called.
    """
    correlation = arrays.to_array(events["correlation"], 0)
    hosts = np.flatnonzero(arrays.is_in(events["cat"], categories.HOST_CATEGORIES) & (correlation > 0))
    process = encode_processes(events, rows) if process is None else process
    keys = ["correlation", "pid"] if process.any() else ["correlation"]
    calls = events.select(*keys, "ts")[hosts].with_columns(pl.Series("call", hosts))
    at = np.flatnonzero(correlation[rows] > 0)
    device_rows = events.select(*keys, "ts")[rows[at]].with_columns(pl.Series("at", at))
    repeated = calls.height - calls.select(keys).n_unique()
    if not repeated:
        joined = device_rows.join(calls.drop("ts"), on=keys, how="inner")
    else:
        joined = pl.concat(
            device_rows.sort("ts").join_asof(
                calls.sort("ts").with_columns(pl.col("ts").alias("called")),
                on="ts",
                by=keys,
                strategy=strategy,
                check_sortedness=False,
            )
            for strategy in ("forward", "backward")
        ).drop_nulls("call")
    call_rows = np.full(len(rows), -1, np.int64)
    # The backward matches come last and so prevail.
    call_rows[joined["at"].to_numpy()] = joined["call"].to_numpy()
    return call_rows, repeated


def encode_processes(events: pl.DataFrame, work: np.ndarray) -> np.ndarray:
    """Return the process number of each event, as far as correlations are numbered per process; otherwise all are 0.

    That is the case if several processes launch and these rows, device events, have their pids.
    """
    hosts = (
        arrays.is_in(events["cat"], categories.HOST_CATEGORIES)
        & (events["correlation"] > 0).fill_null(False).to_numpy()
    )
    pids = events["pid"].fill_null(0)
    launching = pids.filter(pl.Series(hosts)).unique()
    if len(launching) < 2 or not pids[work].is_in(launching.implode()).all():
        return np.zeros(events.height, np.int64)
    return pids.rank("dense").cast(pl.Int64).to_numpy()


def classify_missing_launches(
    events: pl.DataFrame, process: np.ndarray, missing: np.ndarray
) -> dict[str, np.ndarray]:
    """Return rows of GPU activity without a launch call, grouped by the reason.

    A process numbers its calls upwards. So GPU activity with a lower number than all recorded calls of its process
    was launched_before_recording (the host runs ahead of the device), with a higher one launched_after_recording;
    otherwise the recorder lost the call: launch_not_recorded. without_correlation: the call is unknown.
    no_calls_recorded: the recording holds the device side only.

    Args:
        events: The table ``events``.
        process: The process number of each event (`encode_processes`).
        missing: Rows of GPU activity without a launch call.
    """
    correlation = arrays.to_array(events["correlation"], 0)
    calls = np.flatnonzero(arrays.is_in(events["cat"], categories.RUNTIME_CATEGORIES) & (correlation > 0))
    if not calls.size:
        return {"no_calls_recorded": missing}
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
    """Return the lowest and the highest number of these rows per group; an unlimited range for a group without rows."""
    size = int(group.max(initial=0)) + 1
    lowest, highest = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
    np.minimum.at(lowest, group[rows], numbers[rows])
    np.maximum.at(highest, group[rows], numbers[rows])
    none = highest < 0
    lowest[none], highest[none] = 0, np.iinfo(np.int64).max
    return lowest, highest


def find_launches_without_work(events: pl.DataFrame, call: np.ndarray) -> np.ndarray:
    """Return rows of calls without recorded GPU activity, of the call names that launch elsewhere in the trace."""
    used = np.unique(call[call >= 0])
    launching = events["name"].is_in(events["name"][used].unique().implode()).fill_null(False).to_numpy()
    numbered = (events["correlation"] > 0).fill_null(False).to_numpy()
    idle = launching & numbered & arrays.is_in(events["cat"], categories.RUNTIME_CATEGORIES)
    idle[used] = False
    return np.flatnonzero(idle)


def find_enclosing_operator(events: pl.DataFrame, rows: np.ndarray) -> np.ndarray:
    """Return for host events the row of the innermost operator around each, else of an annotation, else -1.

    A step is not an operator. An annotation inside an operator (nccl:all_reduce in record_param_comms) is skipped in
    favour of the operator, as in Kineto's own External ids.
    """
    parent = rows_of_ids(events, events["parent"])
    outer = np.where(rows >= 0, parent[rows], -1)
    operators = arrays.is_in(events["cat"], categories.OPERATOR_CATEGORIES)
    operator_rows = nesting.find_nearest_ancestor(parent, operators, outer)
    annotations = arrays.is_in(events["cat"], categories.ANNOTATION_CATEGORIES)
    annotations &= ~match_steps(events["name"], annotations)
    return np.where(
        operator_rows >= 0, operator_rows, nesting.find_nearest_ancestor(parent, annotations, outer)
    )


def _add_device_steps(events: pl.DataFrame, launched: tuple[np.ndarray, np.ndarray] | None) -> pl.DataFrame:
    """Return events with the step of device-side rows: of the launch, call or annotation they belong to."""
    step = events["step"].fill_null(0).to_numpy().copy()
    has_step = events["step"].is_not_null().to_numpy().copy()
    caused = [] if launched is None else [launched]
    syncs = np.flatnonzero(arrays.is_in(events["cat"], ("cuda_sync",)))
    if syncs.size:
        caused.append((syncs, find_calls(events, syncs)[0]))
    ranges = np.flatnonzero(arrays.is_in(events["cat"], ("gpu_user_annotation",)))
    if ranges.size:
        caused.append((ranges, _find_host_annotations(events, ranges)))
    for rows, cause in caused:
        ok = (cause >= 0) & has_step[cause]
        step[rows[ok]] = step[cause[ok]]
        has_step[rows[ok]] = True
    return events.with_columns(pl.Series("step", step).set(pl.Series(~has_step), None))


def _find_host_annotations(events: pl.DataFrame, ranges: np.ndarray) -> np.ndarray:
    """Return for annotations on the device the row of the host's annotation, by External id and name, or -1."""
    hosts = np.flatnonzero(arrays.is_in(events["cat"], categories.ANNOTATION_CATEGORIES))
    keys = ["external_id", "name"]
    host = (
        events[hosts].select(*keys, pl.Series("cause", hosts)).unique(keys, keep="first", maintain_order=True)
    )
    joined = events[ranges].select(keys).join(host, on=keys, how="left", maintain_order="left")
    return joined["cause"].fill_null(-1).to_numpy()
