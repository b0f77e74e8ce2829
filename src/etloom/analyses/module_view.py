"""nn.Modules: number of calls, host time and device time of each.

One row per module class and position among the enclosing classes (path). Instances of one class at one position are
counted together. self_device_ns: time of the GPU activity launched in the module and not in a module below it; device
columns are null if the trace has no GPU activity. Backward runs outside of the modules and is not included. Each
replay of a device graph counts as a call, without host time, of the modules that its capture recorded. Without a
capture the modules of its kernels are those that torch.cuda's graph annotations name (module_fqn, torch 2.12 and
later): path is then the qualified name, and the kernels do not count for the module that launched the graph.

Units: ns. Needs Python frames: profile with with_stack=True (or with_modules=True). Definition: TraceLens' module view.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.helpers import Step, check_step, check_top, conform_columns, filter_step, require_linked
from etloom.analyses.helpers.launched_work import read_graph_annotations
from etloom.core import arrays, categories, nesting
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, has_device_events

SCOPE = "rank"
COLUMNS = {
    "path": pl.String,
    "module": pl.String,
    "depth": pl.Int64,
    "count": pl.Int64,
    "instances": pl.Int64,
    "host_ns": pl.Int64,
    "device_ns": pl.Int64,
    "self_device_ns": pl.Int64,
    "kernels": pl.Int64,
}
_DEVICE = ("device_ns", "self_device_ns", "kernels")
_CAPTURED_FUNCTION = categories.CAPTURED_CATEGORIES["python_function"]
_MODULE = r"^nn\.Module: (.*?)(?:_\d+)?$"


def analyze(
    trace: Trace,
    *,
    depth: Annotated[int | None, "Only modules up to this depth; 0 is the outermost."] = None,
    top: Annotated[int | None, "Maximum number of rows, most expensive first (default: all)."] = None,
    step: Step = None,
) -> pl.DataFrame:
    check_top(1 if top is None else top)
    require_linked(trace)
    events = trace.events
    is_module = arrays.match_text(events["name"], _MODULE)
    is_module &= arrays.is_present(events["depth"]) | categories.mask_events(events, (_CAPTURED_FUNCTION,))
    rows = np.flatnonzero(is_module)
    launches = filter_step(
        trace, trace.launches.join(events.select("dur", "step", device_event="id"), on="device_event"), step
    )
    named = read_graph_annotations(trace, launches["device_event"])["module"].cast(pl.String)
    named = pl.select(pl.when(launches["captured"].is_null()).then(named)).to_series()
    if not rows.size and named.null_count() == len(named):
        raise AnalysisError(
            "the trace contains no modules",
            where=describe_rank(trace),
            remedy="profile with with_stack=True or with_modules=True",
        )
    check_step(trace, step)
    unnamed = launches.filter(named.is_null())
    tables = [_list_calls(trace, is_module, rows, step, unnamed), _list_named_modules(launches, named)]
    table = pl.concat(tables, how="vertical_relaxed")
    table = table if depth is None else table.filter(pl.col("depth") <= depth)
    sums = (
        table.group_by("path", "module", "depth", maintain_order=True)
        .agg(
            pl.col("calls").sum().alias("count"),
            pl.col("instance").n_unique().alias("instances"),
            pl.col("dur").sum().alias("host_ns"),
            pl.col("device_ns").sum(),
            pl.col("self_device_ns").sum(),
            pl.col("kernels").sum(),
        )
        .sort("device_ns", "host_ns", "path", descending=(True, True, False))
    )
    if not has_device_events(trace):
        sums = sums.with_columns(pl.lit(None, pl.Int64).alias(name) for name in _DEVICE)
    return conform_columns(sums if top is None else sums.head(top), COLUMNS)


def _list_calls(
    trace: Trace,
    is_module: NDArray[np.bool_],
    rows: NDArray[np.int64],
    step: int | None,
    launches: pl.DataFrame,
) -> pl.DataFrame:
    """Return the calls of nn.Modules in a step: path, module, instance, depth, dur, device_ns, self_device_ns, kernels,
    calls.

    A captured module has one row; ``calls`` is the number of its replays, 1 for others.
    """
    events = trace.events
    parent = rows_of_ids(events, events["parent"])
    outer_rows = nesting.find_nearest_ancestor(parent, is_module, parent[rows])
    # Both in ``rows``, which are ascending; -1 for an outermost call.
    outer = np.where(outer_rows >= 0, np.searchsorted(rows, outer_rows), -1).tolist()
    instances = events["name"][rows].cast(pl.String)
    modules = instances.str.extract(_MODULE, 1).to_list()
    paths, depths = list(modules), [0] * len(modules)
    self_device, self_kernels = _sum_launched(events, launches, is_module, rows, parent)
    device, kernels = self_device.copy(), self_kernels.copy()
    # Captured events have no depth, and come after the events around them.
    by_depth = np.argsort(arrays.to_array(events["depth"][rows], 0), kind="stable").tolist()
    for i in by_depth:
        if outer[i] >= 0:
            paths[i], depths[i] = f"{paths[outer[i]]}/{modules[i]}", depths[outer[i]] + 1
    for i in reversed(by_depth):
        if outer[i] >= 0:
            device[outer[i]] += device[i]
            kernels[outer[i]] += kernels[i]
    captured = arrays.is_in(events["cat"][rows], (_CAPTURED_FUNCTION,))
    calls = np.where(captured, _count_replays(events, launches, parent)[rows], 1)
    table = pl.DataFrame(
        {
            "path": paths,
            "module": modules,
            "instance": instances,
            "depth": depths,
            "dur": events["dur"][rows],
            "device_ns": device,
            "self_device_ns": self_device,
            "kernels": kernels,
            "calls": calls,
        }
    )
    in_step = captured | (
        True if step is None else (events["step"][rows] == step).fill_null(False).to_numpy()
    )
    return table.filter(pl.Series(in_step & (calls > 0)))


def _list_named_modules(launches: pl.DataFrame, names: pl.Series) -> pl.DataFrame:
    """Return the modules, and those around them, that annotations of graph kernels name; columns as `_list_calls`."""
    parts = pl.col("name").str.split(".")
    prefixes = pl.int_ranges(1, parts.list.len() + 1)
    kernels = launches.select("launch", "dur", name=names).drop_nulls("name").with_columns(length=prefixes)
    path = pl.col("name").str.split(".").list.head(pl.col("length")).list.join(".")
    return (
        kernels.explode("length")
        .with_columns(path=path, is_innermost=pl.col("length") == pl.col("name").str.split(".").list.len())
        .group_by("path", maintain_order=True)
        .agg(
            pl.col("length").first().cast(pl.Int64).alias("depth"),
            pl.col("dur").sum().alias("device_ns"),
            pl.col("dur").filter("is_innermost").sum().alias("self_device_ns"),
            pl.len().cast(pl.Int64).alias("kernels"),
            pl.col("launch").n_unique().cast(pl.Int64).alias("calls"),
        )
        .select(
            "path",
            pl.col("path").str.split(".").list.last().alias("module"),
            pl.col("path").alias("instance"),
            pl.col("depth") - 1,
            pl.lit(None, pl.Int64).alias("dur"),
            "device_ns",
            "self_device_ns",
            "kernels",
            "calls",
        )
    )


def _count_replays(
    events: pl.DataFrame, launches: pl.DataFrame, parent: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of replays of the device graph that each captured event belongs to; 0 for other events."""
    graphs = categories.mask_events(events, (categories.CAPTURED_GRAPH,))
    counts = np.zeros(events.height + 1, np.int64)  # the last for -1
    replayed = launches.select("launch", "captured").drop_nulls()
    graph = nesting.find_nearest_ancestor(parent, graphs, rows_of_ids(events, replayed["captured"]))
    replays = replayed.select("launch", graph=pl.Series(graph)).unique()
    np.add.at(counts, replays["graph"].to_numpy(), 1)
    around: NDArray[np.int64] = counts[
        nesting.find_nearest_ancestor(parent, graphs, np.arange(events.height))
    ]
    return around


def _sum_launched(
    events: pl.DataFrame,
    launches: pl.DataFrame,
    is_module: NDArray[np.bool_],
    rows: NDArray[np.int64],
    parent: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the device time (ns) and number of GPU activities launched, or captured, directly in each module call."""
    launches = launches.drop_nulls("launch")
    launch_rows = rows_of_ids(events, launches.select(pl.coalesce("captured", "launch")).to_series())
    around = nesting.find_nearest_ancestor(parent, is_module, launch_rows)
    inside = around >= 0
    calls = np.searchsorted(rows, around[inside])
    device, kernels = np.zeros(rows.size, np.int64), np.zeros(rows.size, np.int64)
    np.add.at(device, calls, arrays.to_array(launches["dur"], 0)[inside])
    np.add.at(kernels, calls, 1)
    return device, kernels
