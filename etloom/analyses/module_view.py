"""nn.Modules: number of calls, host time and device time of each.

One row per module class and position among the enclosing classes (path). Instances of one class at one position are
counted together. self_device_ns: time of the GPU activity launched in the module and not in a module below it; device
columns are null if the trace has no GPU activity. Backward runs outside of the modules and is not included.

depth: only modules up to this depth; 0 is the outermost. top: maximum number of rows, most expensive first (default:
all). step: only this step.

Units: ns. Needs Python frames: profile with with_stack=True (or with_modules=True). Definition: TraceLens' module view.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses.helpers import check_top, conform_columns, filter_step, require_linked
from etloom.core import arrays
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
_MODULE = r"^nn\.Module: (.*?)(?:_\d+)?$"


def analyze(
    trace: Trace, *, depth: int | None = None, top: int | None = None, step: int | None = None
) -> pl.DataFrame:
    check_top(1 if top is None else top)
    require_linked(trace)
    events = trace.events
    is_module = arrays.match_text(events["name"], lambda name: name.str.contains(_MODULE))
    is_module &= events["depth"].is_not_null().to_numpy()
    rows = np.flatnonzero(is_module)
    if not rows.size:
        raise AnalysisError(
            "the trace contains no modules",
            where=describe_rank(trace),
            remedy="profile with with_stack=True or with_modules=True",
        )
    parent = rows_of_ids(events, events["parent"])
    outer_row = arrays.find_nearest_ancestor(parent, is_module, parent[rows])
    names = events["name"][rows].cast(pl.String).str.extract(_MODULE, 1).to_list()
    full = events["name"][rows].cast(pl.String).to_list()
    module_positions = {int(row): at for at, row in enumerate(rows)}
    paths, depths = list(names), [0] * len(names)
    by_depth = np.argsort(events["depth"][rows].to_numpy(), kind="stable").tolist()
    for at in by_depth:
        outer = module_positions.get(int(outer_row[at]), -1)
        if outer >= 0:
            paths[at], depths[at] = f"{paths[outer]}/{names[at]}", depths[outer] + 1
    self_device = np.zeros(len(rows), np.int64)
    kernels = np.zeros(len(rows), np.int64)
    work = events.select("id", "dur")
    launches = trace.launches.drop_nulls("launch").join(work, left_on="device_event", right_on="id")
    around = arrays.find_nearest_ancestor(parent, is_module, rows_of_ids(events, launches["launch"]))
    module_index = np.searchsorted(rows, around[around >= 0])
    np.add.at(self_device, module_index, launches["dur"].fill_null(0).to_numpy()[around >= 0])
    np.add.at(kernels, module_index, 1)
    total, kernel_total = self_device.copy(), kernels.copy()
    for at in reversed(by_depth):
        outer = module_positions.get(int(outer_row[at]), -1)
        if outer >= 0:
            total[outer] += total[at]
            kernel_total[outer] += kernel_total[at]
    table = pl.DataFrame(
        {
            "path": paths,
            "module": names,
            "instance": full,
            "depth": depths,
            "dur": events["dur"][rows],
            "device": total,
            "own": self_device,
            "kernels": kernel_total,
            "step": events["step"][rows],
        }
    )
    table = filter_step(trace, table, step)
    table = table if depth is None else table.filter(pl.col("depth") <= depth)
    sums = (
        table.group_by("path", "module", "depth", maintain_order=True)
        .agg(
            pl.len().alias("count"),
            pl.col("instance").n_unique().alias("instances"),
            pl.col("dur").sum().alias("host_ns"),
            pl.col("device").sum().alias("device_ns"),
            pl.col("own").sum().alias("self_device_ns"),
            pl.col("kernels").sum(),
        )
        .sort("device_ns", "host_ns", "path", descending=(True, True, False))
    )
    if not has_device_events(trace):
        sums = sums.with_columns(pl.lit(None, pl.Int64).alias(name) for name in _DEVICE)
    return conform_columns(sums if top is None else sums.head(top), COLUMNS)
