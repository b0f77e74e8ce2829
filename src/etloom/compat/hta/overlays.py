"""Trace files that show the result of an analysis by additional event arguments and arrows between events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.compat.hta.frames import UNTIMED_CATEGORY, US
from etloom.core import categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.linker.selection import keep_events

_EVENT_TABLES = ("arguments", "kernels", "syncs", "frames", "comms")
_IN_ARGS = ("device", "stream", "correlation", "external_id", "rf_id", "seq_id", "fwd_tid")
"""Columns that a trace file keeps in an event's args."""
FIRST_EDGE = 1 << 40
"""First id of the arrows of edges, above the ids of a file's own arrows."""
_ARROW = "critical_path"
_DRAWN = ("critical_path_dependency", "critical_path_kernel_launch_delay", "critical_path_sync_dependency")


def overlay_path(source: Path, *words: str) -> str:
    """Return the name of the output file: ``words`` and the name of the source file, joined by "_"."""
    name = (
        source.name if source.name.endswith((".json", ".json.gz")) else f"{source.name.split('.')[0]}.json.gz"
    )
    return "_".join((*words, name))


def add_sequences(trace: Trace, calls: pl.DataFrame, numbers: Mapping[str, int] | None) -> Trace:
    """Add the argument Patterns ({kernel sequence: count}) to the events inside ``calls`` or launched there.

    calls: call (row of the events), pattern, count. numbers: number of every name; the other
    events get the number as name and lose their arguments, and the file's ``symbols`` lists them.
    """
    at = _calls_around(trace, calls["call"].to_numpy())
    arguments_by_call = {
        call: json.dumps({"Patterns": {pattern: count}})
        for call, pattern, count in calls.select("call", "pattern", "count").iter_rows()
    }
    arguments = pl.Series(at).replace_strict(arguments_by_call, default=None, return_dtype=pl.String)
    annotated = _add_argument(trace, arguments)
    if numbers is None:
        return annotated
    events = trace.events
    rest = pl.Series(at < 0) & (events["ph"] == "X") & events["cat"].ne_missing(UNTIMED_CATEGORY)
    number = pl.col("name").cast(pl.String).replace_strict(numbers, default=None, return_dtype=pl.Int64)
    short = pl.coalesce(pl.when(rest).then(number.cast(pl.String)), pl.col("name").cast(pl.String))
    compressed = annotated.events.with_columns(
        pl.when(~rest).then(pl.col(*_IN_ARGS, "args")), name=short.cast(pl.Categorical)
    )
    full_ids = events.filter(~rest)["id"]
    sides = {
        name: trace.table(name).filter(pl.col("event").is_in(full_ids.implode())) for name in _EVENT_TABLES
    }
    symbols = {str(number): name for name, number in numbers.items()}
    return trace.replace(
        {"header": {**trace.meta.get("header", {}), "symbols": symbols}}, events=compressed, **sides
    )


def add_critical_path(
    trace: Trace, path: pl.DataFrame, edges: pl.DataFrame, only_critical: bool, all_edges: bool
) -> Trace:
    """Mark events on the critical path by the argument ``critical``; draw edges of the dependency graph as arrows.

    Args:
        trace: The linked trace.
        path: Events on the critical path (column event).
        edges: The result of `build_edge_arrows` with HTA's edge types. By default only dependencies, launches and
            synchronizations on the path are drawn.
        only_critical: Keep only events on the path, annotations and Python frames.
        all_edges: Draw all edges; ignored with only_critical.
    """
    events = trace.events
    on_path = events["id"].is_in(path["event"].drop_nulls().cast(pl.UInt32).implode())
    arguments = pl.select(pl.when(on_path).then(pl.lit('{"critical": 1}'))).to_series()
    drawn = (
        edges
        if all_edges and not only_critical
        else edges.filter("is_critical", pl.col("type").is_in(_DRAWN))
    )
    labels = pl.struct(
        "type", critical=pl.col("is_critical").cast(pl.Int8), weight=pl.col("time_ns") / US
    ).struct.json_encode()
    ends = drawn.select(
        pl.col("id").cast(pl.UInt32),
        *("ph", "ts", "flow"),
        args=labels,
        cat=pl.lit(_ARROW),
        name=pl.lit(_ARROW),
    )
    tracks = events.select("id", "pid", "tid")
    arrows = TABLES["flows"].conform(ends.join(tracks, on="id", maintain_order="left").drop("id"))
    flows = pl.concat((trace.flows, arrows))
    overlay = _add_argument(trace, arguments).replace(None, flows=flows)
    if not only_critical:
        return overlay
    is_context = (
        categories.mask_events(events, categories.ANNOTATION_CATEGORIES | categories.PYTHON_CATEGORIES)
        | (events["ph"] != "X").to_numpy()
    )
    return keep_events(overlay, on_path.to_numpy() | is_context)


def _add_argument(trace: Trace, arguments: pl.Series) -> Trace:
    """Merge a JSON object per event (null for none) into the column ``args`` of a trace's events."""
    other = pl.col("args").cast(pl.String).fill_null("{}").str.slice(1)
    between = pl.when(other == "}").then(pl.lit("")).otherwise(pl.lit(","))
    both = pl.concat_str(arguments.str.slice(0, arguments.str.len_chars() - 1), between, other)
    args = pl.when(arguments.is_not_null()).then(both).otherwise(pl.col("args").cast(pl.String))
    return trace.replace(None, events=trace.events.with_columns(args=args.cast(pl.Categorical)))


def _calls_around(trace: Trace, calls: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each event the row of the innermost of the ``calls`` that encloses or launched it; -1 for none."""
    events = trace.events
    is_call = np.zeros(events.height, dtype=np.bool_)
    is_call[calls] = True
    at = nesting.find_nearest_ancestor(
        rows_of_ids(events, events["parent"]), is_call, np.arange(events.height)
    ).astype(np.int64)
    launch, work = (rows_of_ids(events, trace.launches[name]) for name in ("launch", "device_event"))
    is_complete = (launch >= 0) & (work >= 0)
    at[work[is_complete]] = at[launch[is_complete]]
    return at
