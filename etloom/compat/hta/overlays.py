"""Trace files that show an answer: events with one more argument, arrows between them, all else left out or short."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.compat.hta.frames import UNTIMED_CATEGORY
from etloom.core import arrays, categories
from etloom.core.arrays import is_in, rows_of_ids
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from etloom.exports.chrome.critical_path_overlay import build_critical_path_arrows
from etloom.graphs import build_graph
from etloom.graphs.graph import EdgeKind
from etloom.linker.selection import keep_events

_OF_EVENT = ("arguments", "kernels", "syncs", "frames", "comms")
_IN_ARGS = ("device", "stream", "correlation", "external_id", "rf_id", "seq_id", "fwd_tid")
"""Columns that a trace file keeps in an event's args."""
_EDGES = "dependency"
_FIRST_EDGE = 1 << 40
"""Numbers arrows of edges on from where no arrow of a file is."""


def overlay_path(source: Path, *words: str) -> str:
    """The name of a file of a format that etloom writes: words, then the name of the source."""
    name = (
        source.name if source.name.endswith((".json", ".json.gz")) else f"{source.name.split('.')[0]}.json.gz"
    )
    return "_".join((*words, name))


def add_sequences(trace: Trace, calls: pl.DataFrame, numbers: Mapping[str, int] | None) -> Trace:
    """The trace with an argument Patterns ({pattern: count}) on what lies in these calls or was launched there.

    calls: call (row of the events), pattern, count. numbers: those of all names, to put in place of the names of the
    rest, which lose their arguments; the file's ``symbols`` tell them.
    """
    at = _calls_around(trace, calls["call"].to_numpy())
    said = {
        call: json.dumps({"Patterns": {pattern: count}})
        for call, pattern, count in calls.select("call", "pattern", "count").iter_rows()
    }
    mine = pl.Series(at).replace_strict(said, default=None, return_dtype=pl.String)
    told = _add_argument(trace, mine)
    if numbers is None:
        return told
    events = trace.events
    rest = pl.Series(at < 0) & (events["ph"] == "X") & events["cat"].ne_missing(UNTIMED_CATEGORY)
    number = pl.col("name").cast(pl.String).replace_strict(numbers, default=None, return_dtype=pl.Int64)
    short = pl.coalesce(pl.when(rest).then(number.cast(pl.String)), pl.col("name").cast(pl.String))
    compressed = told.events.with_columns(
        pl.when(~rest).then(pl.col(*_IN_ARGS, "args")), name=short.cast(pl.Categorical)
    )
    kept = events.filter(~rest)["id"]
    sides = {name: trace.table(name).filter(pl.col("event").is_in(kept.implode())) for name in _OF_EVENT}
    symbols = {str(number): name for name, number in numbers.items()}
    return trace.replace(
        {"header": {**trace.meta.get("header", {}), "symbols": symbols}}, events=compressed, **sides
    )


def add_critical_path(
    trace: Trace, rank: int, path: pl.DataFrame, only_critical: bool, all_edges: bool
) -> Trace:
    """The trace with an argument ``critical`` on the events of a path and arrows from one to the next.

    only_critical: without other events but annotations and Python frames. all_edges: with every edge of the graph.
    """
    events = trace.events
    on_path = events["id"].is_in(path["event"].drop_nulls().cast(pl.UInt32).implode())
    said = pl.select(pl.when(on_path).then(pl.lit('{"critical": 1}'))).to_series()
    ends = [trace.flows, _flows(trace, build_critical_path_arrows({rank: trace}, 0)[rank])]
    if all_edges and not only_critical:
        ends.append(_flows(trace, _edges(Job({rank: trace}))))
    shown = _add_argument(trace, said).replace(None, flows=pl.concat(ends))
    if not only_critical:
        return shown
    beside = (
        is_in(events["cat"], categories.ANNOTATION_CATEGORIES | categories.PYTHON_CATEGORIES)
        | (events["ph"] != "X").to_numpy()
    )
    return keep_events(shown, on_path.to_numpy() | beside)


def _add_argument(trace: Trace, said: pl.Series) -> Trace:
    """The trace with more members in the args of events: said, JSON objects by row, null for none."""
    other = pl.col("args").cast(pl.String).fill_null("{}").str.slice(1)
    between = pl.when(other == "}").then(pl.lit("")).otherwise(pl.lit(","))
    both = pl.concat_str(said.str.slice(0, said.str.len_chars() - 1), between, other)
    args = pl.when(said.is_not_null()).then(both).otherwise(pl.col("args").cast(pl.String))
    return trace.replace(None, events=trace.events.with_columns(args=args.cast(pl.Categorical)))


def _calls_around(trace: Trace, calls: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each event the row of the call that it lies in, or that launched it; -1 of the rest."""
    events = trace.events
    chosen = np.zeros(events.height, dtype=np.bool_)
    chosen[calls] = True
    at = arrays.find_nearest_ancestor(
        rows_of_ids(events, events["parent"]), chosen, np.arange(events.height)
    ).astype(np.int64)
    launch, work = (rows_of_ids(events, trace.launches[name]) for name in ("launch", "device_event"))
    known = (launch >= 0) & (work >= 0)
    at[work[known]] = at[launch[known]]
    return at


def _edges(job: Job) -> pl.DataFrame:
    """The edges of the graph between different events, as ends of arrows: ph, cat, name (its kind), ts, flow, id."""
    graph = build_graph(job).graph
    source, target = graph.source, graph.target
    kept = (
        (graph.event[source] >= 0) & (graph.event[target] >= 0) & (graph.event[source] != graph.event[target])
    )
    labels = pl.Series([EdgeKind(code).label for code in graph.kind[kept]], dtype=pl.String)
    flow = pl.Series(np.arange(_FIRST_EDGE, _FIRST_EDGE + labels.len()))
    ends = (("s", source[kept]), ("f", target[kept]))
    return pl.concat(
        pl.DataFrame(
            {"name": labels, "ts": graph.time[points], "flow": flow, "id": graph.event[points]}
        ).with_columns(ph=pl.lit(ph), cat=pl.lit(_EDGES))
        for ph, points in ends
    )


def _flows(trace: Trace, ends: pl.DataFrame) -> pl.DataFrame:
    """Ends of arrows on events as rows of the table flows."""
    lanes = trace.events.select("id", "pid", "tid")
    placed = ends.with_columns(pl.col("id").cast(pl.UInt32)).join(lanes, on="id", maintain_order="left")
    return TABLES["flows"].conform(placed.drop("id"))
