"""Captures of device graphs: the host events that recorded a graph, stored in `events` under separate categories.

A capture lies between cudaStreamBeginCapture and cudaStreamEndCapture (hip: the same): calls in between launch nothing
but become nodes of the graph. Each captured call, with all events around it, becomes a row of `events` of its own
category (`categories.CAPTURED_CATEGORIES`), below one `captured_graph`. A replay of the graph refers to these rows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import mask_members, match_text, rows_of_ids, to_array
from etloom.core.categories import CAPTURED_CATEGORIES, CAPTURED_GRAPH
from etloom.core.nesting import find_nearest_ancestor
from etloom.core.trace import Trace

Rows = NDArray[np.int64]

_BEGIN, _END = r"StreamBeginCapture", r"StreamEndCapture"
API_CALL = r"^(?:cuda|cu|hip)\w*(?:Launch|Memcpy|Memset)"
"""Names of calls that launch GPU activity, or add a node to a graph that is being captured."""
_NO_NODE = r"GraphLaunch|LaunchHostFunc"
_COMPILED = r"^## Call "
"""Ranges that only name a compiled function."""
_TRITON = r"^triton_"


@dataclass(frozen=True)
class CapturedEvents:
    """Rows for `events` and `arguments` that represent the host events captured into graphs; ids count from 0."""

    events: pl.DataFrame
    arguments: pl.DataFrame


def extract_captures(trace: Trace) -> CapturedEvents | None:
    """Return the host events that a trace captured into device graphs; None without a capture. Needs `place_events`.

    Calls on any thread during a capture belong to it, since autograd captures the backward on a thread of its own,
    except those that launched GPU activity.
    """
    events = trace.events
    runtime = categories.mask_events(events, categories.RUNTIME_CATEGORIES)
    windows = _find_windows(events, runtime)
    if not windows:
        return None
    calls = np.flatnonzero(runtime & match_text(events["name"], _is_node_call))
    parent = rows_of_ids(events, events["parent"])
    calls = calls[(parent[calls] < 0) | ~mask_members(parent[calls], calls)]
    calls = calls[~_has_activity(events, calls)]
    starts = to_array(events["ts"], 0)
    graphs: list[tuple[str, Rows]] = []
    for begin, begin_time, end_time in windows:
        inside = calls[(starts[calls] >= begin_time) & (starts[calls] < end_time)]
        if inside.size:
            graphs.append((_name_capture(events, parent, begin), inside))
    return build_captured_events(trace, parent, graphs, kernel_names=None) if graphs else None


def build_captured_events(
    trace: Trace, parent: Rows, graphs: list[tuple[str, Rows]], kernel_names: pl.Series | None
) -> CapturedEvents:
    """Create `events` rows for the calls captured into graphs and for all events that enclose these calls.

    Args:
        trace: A placed trace.
        parent: Row of the parent of each event.
        graphs: Name of each graph, and the rows of the calls that made its nodes, in order.
        kernel_names: Name of the kernel that each event launched, where it is known from elsewhere.
    """
    events = trace.events
    names = _name_kernels(events, parent, np.concatenate([calls for _, calls in graphs]), kernel_names)
    parts, sources = [], []
    first_id = 0
    for name, calls in graphs:
        rows = _add_ancestors(parent, calls)
        position = np.full(events.height + 1, 0, np.int64)  # 0: the graph; also that of -1
        position[rows] = np.arange(1, rows.size + 1)
        graph = pl.DataFrame({"name": [name], "cat": [CAPTURED_GRAPH], "pid": [-1], "tid": [-1]})
        below = events[rows].select(
            pl.coalesce(names[rows], pl.col("name").cast(pl.String)).alias("name"),
            pl.col("cat").cast(pl.String).replace_strict(CAPTURED_CATEGORIES, default="captured_annotation"),
            "pid",
            "tid",
        )
        parents = pl.Series("parent", [None, *(position[parent[rows]] + first_id)], dtype=pl.UInt32)
        parts.append(pl.concat([graph, below], how="vertical_relaxed").with_columns(parents))
        sources.append(pl.DataFrame({"event": rows, "id": position[rows] + first_id}))
        first_id += rows.size + 1
    captured = pl.concat(parts).with_columns(
        pl.int_range(pl.len(), dtype=pl.UInt32).alias("id"),
        pl.lit("X").alias("ph"),
        pl.col("name", "cat").cast(pl.Categorical),
    )
    source = pl.concat(sources).select(
        pl.col("id").cast(pl.UInt32), event=events["id"].gather(pl.concat(sources)["event"])
    )
    arguments = source.join(trace.arguments, on="event").drop("event").rename({"id": "event"})
    return CapturedEvents(captured, arguments)


def add_captured_events(trace: Trace, parts: list[CapturedEvents]) -> Trace:
    """Append captured events to a trace's events; they start with its last event and have no duration."""
    events, arguments = trace.events, trace.arguments
    last = events["ts"].max()
    for part in parts:
        first_id = int(events["id"].max() or 0) + 1 if events.height else 0  # type: ignore[arg-type]
        more = part.events.with_columns(
            pl.col("id", "parent") + first_id, pl.lit(0 if last is None else last, pl.Int64).alias("ts")
        )
        shifted = part.arguments.with_columns(pl.col("event") + first_id)
        events = pl.concat(
            [events, more.cast({"id": pl.UInt32, "parent": pl.UInt32})], how="diagonal_relaxed"
        )
        arguments = pl.concat([arguments, shifted.cast({"event": pl.UInt32})], how="diagonal_relaxed")
    return trace.replace(events=events, arguments=arguments)


def split_captured_events(trace: Trace) -> tuple[Trace, CapturedEvents | None]:
    """Split a trace that was linked before into the trace without captured events, and the captured events."""
    events = trace.events
    is_captured = categories.mask_events(events, categories.CAPTURED)
    if not is_captured.any():
        return trace, None
    mask = pl.Series(is_captured)
    captured = events.filter(mask)
    new_ids = pl.DataFrame(
        {"id": captured["id"], "new": pl.int_range(captured.height, eager=True, dtype=pl.UInt32)}
    )
    parents = captured.select(id="parent").join(new_ids, on="id", how="left", maintain_order="left")["new"]
    arguments = trace.arguments.rename({"event": "id"})
    of_captured = arguments.join(new_ids, on="id").rename({"new": "event"}).drop("id")
    rest = trace.replace(
        events=events.filter(~mask),
        arguments=arguments.join(new_ids, on="id", how="anti").rename({"id": "event"}),
    )
    columns = captured.select("ph", "cat", "name", "pid", "tid", parent=parents, id=new_ids["new"])
    return rest, CapturedEvents(columns, of_captured)


def _find_windows(events: pl.DataFrame, runtime: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Return (row of the begin call, begin time, end time) of each graph capture, times in ns."""
    marks = np.flatnonzero(runtime & categories.match_names(events, f"{_BEGIN}|{_END}"))
    windows = []
    open_by_thread: dict[tuple[int, int], tuple[int, int]] = {}
    columns = events[marks].select("name", "pid", "tid", "ts")
    for row, (name, pid, tid, ts) in zip(marks.tolist(), columns.iter_rows(), strict=True):
        if _BEGIN in name:
            open_by_thread[pid, tid] = (row, ts)
        elif (begin := open_by_thread.pop((pid, tid), None)) is not None:
            windows.append((*begin, ts))
    return windows


def _is_node_call(name: pl.Expr) -> pl.Expr:
    return name.str.contains(API_CALL) & ~name.str.contains(_NO_NODE)


def _has_activity(events: pl.DataFrame, calls: Rows) -> NDArray[np.bool_]:
    """Return a mask of the calls that launched GPU activity, by correlation."""
    work = categories.mask_events(events, categories.DEVICE_CATEGORIES)
    used = events.filter(pl.Series(work))["correlation"].drop_nulls().unique()
    used = used.filter(used > 0)
    mask: NDArray[np.bool_] = events["correlation"][calls].is_in(used.implode()).fill_null(False).to_numpy()
    return mask


def _name_capture(events: pl.DataFrame, parent: Rows, begin: int) -> str:
    """Name a capture after the innermost annotation around it, else after its time in the recording."""
    row = int(parent[begin])
    while row >= 0:
        name = events["name"][row]
        if events["cat"][row] in categories.ANNOTATION_CATEGORIES and name and not re.match(_COMPILED, name):
            return str(name)
        row = int(parent[row])
    return f"captured {(events['ts'][begin] - events['ts'].min()) / 1e6:.3f} ms into the recording"


def _name_kernels(
    events: pl.DataFrame, parent: Rows, calls: Rows, kernel_names: pl.Series | None
) -> pl.Series:
    """Return for each event the name of the kernel that it launched; null if it launched none or the name is unknown.

    ROCm states it with the call. CUDA does not; of Triton's kernels it is the name of the operator.
    """
    if kernel_names is not None:
        return kernel_names
    names: list[str | None] = [None] * events.height
    operators = categories.mask_events(events, categories.OPERATOR_CATEGORIES)
    around = find_nearest_ancestor(parent, operators, calls)
    is_triton = match_text(events["name"], _TRITON)
    parsed: dict[str, str | None] = {}
    arguments = events["args"][calls].cast(pl.String).to_list()
    for call, operator, text in zip(calls.tolist(), around.tolist(), arguments, strict=True):
        if text and text not in parsed:
            parsed[text] = _parse_kernel_name(text)
        name = parsed[text] if text else None
        names[call] = name or (events["name"][operator] if operator >= 0 and is_triton[operator] else None)
    return pl.Series(names, dtype=pl.String)


def _parse_kernel_name(text: str) -> str | None:
    try:
        kernel = json.loads(text).get("kernel")
    except (ValueError, AttributeError, RecursionError):
        return None
    return kernel if isinstance(kernel, str) and kernel else None


def _add_ancestors(parent: Rows, rows: Rows) -> Rows:
    """Return row numbers of events and of all events that enclose them, in ascending order."""
    levels, climbing = [rows], rows
    while climbing.size:
        climbing = np.unique(parent[climbing])
        climbing = climbing[climbing >= 0]
        levels.append(climbing)
    return np.unique(np.concatenate(levels))
