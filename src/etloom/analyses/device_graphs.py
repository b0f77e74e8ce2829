"""Device graphs (CUDA, HIP): replays of each captured graph, and its share of the time of all replays.

One row per captured graph, and one per graph id for replays, or kernels of replays, without a matching capture. graph
is the annotation around the capture, else "graph" and the id, if recorded; replays the number of launches; kernels and
device_ns count the GPU activity. operators: different operators that the capture recorded around its calls, null
without one. modules: different modules that torch.cuda's graph annotations name. attributed_pct: share of the time of
all replays that belongs to the graph; without a capture only that of kernels with a module counts.

Units: ns, percent. The rows of stats ``link.graph_activity_*`` say why activity could not be attributed.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import conform_columns, filter_step, percent, require_linked
from etloom.analyses.helpers.launched_work import read_graph_annotations
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
COLUMNS = {
    "graph": pl.String,
    "replays": pl.Int64,
    "kernels": pl.Int64,
    "device_ns": pl.Int64,
    "attributed_pct": pl.Float64,
    "operators": pl.Int64,
    "modules": pl.Int64,
}


def analyze(
    trace: Trace, *, step: Annotated[int | None, "Only replays launched in this step."] = None
) -> pl.DataFrame:
    require_linked(trace)
    events, launches = trace.events, trace.launches
    calls = take_rows(events["name"], rows_of_ids(events, launches["launch"]))
    is_replay = arrays.match_text(calls, categories.GRAPH_LAUNCH)
    if not is_replay.any():
        raise AnalysisError(
            "the trace contains no replays of device graphs",
            where=describe_rank(trace),
            remedy="see launch-stats for the calls that launched its GPU activity",
        )
    work = events.select("dur", "step", device_event="id")
    replays = launches.filter(pl.Series(is_replay)).join(work, on="device_event", maintain_order="left")
    parent = rows_of_ids(events, events["parent"])
    graphs = categories.mask_events(events, (categories.CAPTURED_GRAPH,))
    graph = nesting.find_nearest_ancestor(parent, graphs, rows_of_ids(events, replays["captured"]))
    graph_id = trace.kernels.select("graph_id", device_event="event")
    replays = replays.join(graph_id, on="device_event", how="left", maintain_order="left").with_columns(
        pl.Series("row", graph), read_graph_annotations(trace, replays["device_event"])["module"]
    )
    has_capture = pl.col("row") >= 0
    replays = replays.with_columns(graph_id=pl.when(~has_capture).then("graph_id"))
    table = (
        filter_step(trace, replays, step)
        .group_by("row", "graph_id")
        .agg(
            pl.col("launch").n_unique().alias("replays"),
            pl.len().alias("kernels"),
            pl.col("dur").sum().alias("device_ns"),
            pl.col("operator").n_unique().alias("operators"),
            pl.col("module").drop_nulls().n_unique().alias("modules"),
            pl.col("dur").filter(has_capture | pl.col("module").is_not_null()).sum().alias("attributed"),
        )
        .with_columns(
            percent("attributed", pl.col("device_ns").sum()).alias("attributed_pct"),
            pl.when(has_capture).then("operators").alias("operators"),
        )
    )
    names = take_rows(events["name"], table["row"].to_numpy()).cast(pl.String)
    table = table.with_columns(pl.coalesce(names, pl.format("graph {}", "graph_id")).alias("graph"))
    return conform_columns(table, COLUMNS).sort(
        "device_ns", "graph", descending=(True, False), nulls_last=True
    )
