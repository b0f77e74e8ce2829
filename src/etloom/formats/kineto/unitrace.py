"""Categories, devices and streams of the events in the timeline of Intel's unitrace (--chrome-kernel-logging, ...).

Processes are named HOST<name> and DEVICE<...>, after "RANK n" under MPI. Work of a device has the category gpu_op, and
its name ends in the shape of the kernel ("[SIMD32 {64; 1; 1} {256; 1; 1}]") or the size of a copy; everything of the
host is cpu_op. Arrows lead from calls to their work.

Layout: tools/unitrace/src/chromelogger.h of intel/pti-gpu.
"""

from __future__ import annotations

import re

import polars as pl

from etloom.core.schema import TABLES
from etloom.core.trace import Trace

_PROCESS = r"^(?:RANK \d{1,9} )?(?:HOST|DEVICE)(?:-OS-KMD)?<"
_RANK = r"^RANK (\d{1,9}) "
RANK = re.compile(rb'"RANK (\d{1,9}) (?:HOST|DEVICE)<')
"""The rank in the names of processes."""
PROCESS = re.compile(rb'"(?:RANK \d{1,9} )?(?:HOST|DEVICE)(?:-OS-KMD)?<')
"""The name of a process."""
RECORDER = "unitrace"
"""The product in the header of the trace."""
_DEVICE = r"^(?:RANK \d{1,9} )?DEVICE<"
_DRIVER = r"^(?:ze[sx]?|cl)[A-Z]\w+"
_RUNTIME = r"^(?:ur|sycl|pi)[A-Z_:]\w*"
_COPY = r"(?i)^(?:Tile #\d+: )?(?:ze\w*Append|cl\w*Enqueue|cl)\w*(?:Copy|Migrate|ReadBuffer|WriteBuffer)"
_FILL = r"(?i)^(?:Tile #\d+: )?(?:ze\w*Append|cl\w*Enqueue|cl)\w*Fill"
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_GROUPS = r"\{(\d{1,9}); ?(\d{1,9}); ?(\d{1,9})\} ?\{(\d{1,9}); ?(\d{1,9}); ?(\d{1,9})\}\]$"
_BYTES = r"\[(\d{1,15})\]$"


def is_timeline(trace: Trace) -> bool:
    """Return whether the processes of a trace have the names that unitrace gives them."""
    names = _name_processes(trace)["name"]
    return names.len() > 0 and bool(names.str.contains(_PROCESS).all())


def _name_processes(trace: Trace) -> pl.DataFrame:
    rows = trace.threads.filter(pl.col("tid").is_null(), pl.col("name").is_not_null())
    return rows.select("pid", pl.col("name").cast(pl.String)).unique("pid", keep="first", maintain_order=True)


def categorize(trace: Trace) -> Trace:
    """Return the trace with the work and the calls of devices as such, and with geometry and sizes of the work."""
    processes = _name_processes(trace)
    devices = processes.filter(pl.col("name").str.contains(_DEVICE)).with_row_index("number")
    events = trace.events.join(
        devices.select("pid", pl.col("number").cast(pl.Int32)), on="pid", how="left", maintain_order="left"
    )
    name, recorded = pl.col("name").cast(pl.String), pl.col("cat").cast(pl.String)
    is_work = (recorded == "gpu_op").fill_null(False)
    category = (
        pl.when(is_work & name.str.contains(_COPY))
        .then(pl.lit("gpu_memcpy"))
        .when(is_work & name.str.contains(_FILL))
        .then(pl.lit("gpu_memset"))
        .when(is_work)
        .then(pl.lit("kernel"))
        .when(name.str.contains(_RUNTIME))
        .then(pl.lit("xpu_runtime"))
        .when(name.str.contains(_DRIVER))
        .then(pl.lit("xpu_driver"))
        .otherwise(recorded)
    )
    events = events.with_columns(
        cat=category.cast(pl.Categorical),
        device=pl.when(is_work)
        .then(pl.coalesce("device", "number", pl.lit(0, pl.Int32)))
        .otherwise("device"),
        stream=pl.when(is_work).then(pl.coalesce("stream", "tid")).otherwise("stream"),
    ).drop("number")
    ranks = processes["name"].str.extract(_RANK).drop_nulls().unique()
    rank = {"rank": int(ranks[0])} if ranks.len() == 1 and trace.rank is None else {}
    end = (
        pl.when(pl.col("ph").cast(pl.String) == "t").then(pl.lit("f")).otherwise(pl.col("ph").cast(pl.String))
    )
    flows = trace.flows.with_columns(ph=end.cast(pl.Categorical))
    kernels = _measure(events.filter(pl.col("cat").cast(pl.String).is_in(_WORK)))
    meta = {**rank, "header": {**trace.meta.get("header", {}), "product": RECORDER}}
    return trace.replace(meta, events=events, flows=flows, kernels=kernels)


def _measure(work: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of kernels that the names state: groups, items of a group, and bytes copied or set."""
    name = pl.col("name").cast(pl.String)
    groups = name.str.extract_groups(_GROUPS)
    axes = [f"{kind}_{axis}" for kind in ("grid", "block") for axis in "xyz"]
    rows = work.select(
        event="id",
        bytes=name.str.extract(_BYTES).cast(pl.Int64),
        **{axis: groups.struct[i].cast(pl.Int64) for i, axis in enumerate(axes)},
    )
    stated = rows.filter(pl.any_horizontal(pl.col("bytes", *axes).is_not_null()))
    return TABLES["kernels"].conform(stated)
