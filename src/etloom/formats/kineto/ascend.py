"""Infers categories, devices and streams of the events in Ascend's trace_view.json from process names and arguments.

msprof and torch_npu write one Chrome trace: host operators with Kineto's categories, and without a category the
processes "CANN" (calls that launch), "Ascend Hardware" (tasks on streams), "Communication" or "HCCL" (collectives, and
their tasks by plane) and "Overlap Analysis" (sums of the others). A connection_id joins a call to its tasks.

Layout: MindStudio's description of trace_view.json (CANN 6 to 8).
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.categories import add_kernel_type
from etloom.core.intervals import Intervals
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.formats.io.compression import read_content
from etloom.formats.tables.comms_table import normalize_comms

_MAX_BYTES = 1 << 32
_QUOTED_TIME = re.compile(rb'("(?:ts|dur)"\s{0,8}:\s{0,8})"(-?\d{1,19}(?:\.\d{1,9})?)"')
HARDWARE = "Ascend Hardware"
"""Name of the process of the NPU."""
COLLECTIVES = "Communication"
"""Name of the process of collectives."""
_CALLS = ("CANN",)
_COMMUNICATION, _SUMMARIES = (COLLECTIVES, "HCCL"), ("Overlap Analysis",)
_UNKNOWN_TASK = r"^(?:OTHER|UNKNOWN|N/?A|INVALID)?$"
"""Task types that state nothing, such as all of Level0: the name is an operator's, or the type of the task."""
_COPY_TASK = r"^(?:MEMCPY|SDMA|PCIE_DMA)"
_COMPUTE_TASK = r"^(?:KERNEL_)?(?:AI_?(?:CORE|CPU|VEC|VECTOR_CORE)|AIC|AIV|MIX_AI[CV]|DSA)|KERNEL"
_WAIT_TASK = (
    r"EVENT|NOTIFY|WAIT|RECORD|PROFILER|^MODEL|LABEL|STREAM|PLACE_?HOLDER|MAINT|BARRIER|WRITE_?VALUE|FLIP"
)
_TASK_TYPE = r"^[A-Z][A-Z0-9]*(?:[_ ][A-Z0-9]+)*$"
"""The form of a type instead of an operator's name: EVENT_WAIT, PROFILER_TRACE_EX."""
_COLLECTIVE = r"^hcom_"
_GROUP = r"__(\w+?)_\d+_\d+$"
TASK, COLLECTIVE_TASK, SUMMARY = "npu_task", "hccl_task", "overlap_analysis"
"""Categories of tasks that wait or notify, of parts of a collective, and of sums of other events."""

_SUMMARY_KINDS = {"Computing": "computation", "Communication": "communication"}
"""Rows of the sums, and the kernel type whose time each states."""
_SUMMARY_TOLERANCE = 0.02
_FACTS = ("connection", "queue", "task")


@contextlib.contextmanager
def unquote_times(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary copy in which times, which Ascend writes as quoted text, are JSON numbers.

    Raises:
        LimitError: The file is larger than `_MAX_BYTES`, or a decompression bomb.
    """
    content, _ = read_content(path, _MAX_BYTES)
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        plain = Path(folder) / "trace.json"
        plain.write_bytes(_QUOTED_TIME.sub(rb"\1\2", content))
        yield plain


def categorize(trace: Trace, facts: pl.DataFrame | None = None) -> Trace:
    """Return the trace with category, device, stream and correlation of NPU activities set, and with a comms table.

    A task that computes or copies, and a whole collective, is work of the device; waits, parts of collectives and sums
    are not, so that no time counts twice.

    Args:
        trace: A trace of an NPU.
        facts: Per event the columns ``connection``, ``queue`` (int64) and ``task`` (text, its type), if they need not
            be read from the arguments.
    """
    processes = trace.threads.filter(pl.col("tid").is_null()).select(
        "pid",
        process=pl.col("name").cast(pl.String).str.strip_chars(),
        number=pl.col("labels").cast(pl.String).str.extract(r"(\d{1,6})").cast(pl.Int32),
    )
    events = trace.events.join(
        processes.unique("pid", keep="first"), on="pid", how="left", maintain_order="left"
    )
    # The process of communication has no number.
    hardware = next(iter(processes.filter(pl.col("process") == HARDWARE)["number"].drop_nulls()), 0)
    events = events.with_columns(facts if facts is not None else _read_facts(events["args"]))
    events = events.with_columns(
        cat=pl.when(pl.col("dur").is_not_null()).then(_choose_categories(events)),
        recorded=pl.col("cat").cast(pl.String),
    )
    is_work = pl.col("cat").is_in(["kernel", "gpu_memcpy"]).fill_null(False)
    is_joined = is_work | (pl.col("cat") == "privateuse1_runtime").fill_null(False)
    events = events.with_columns(
        cat=pl.coalesce("cat", "recorded").cast(pl.Categorical),
        device=pl.when(is_work)
        .then(pl.coalesce("device", "number", pl.lit(hardware, pl.Int32)))
        .otherwise("device"),
        stream=pl.when(is_work).then(pl.coalesce("stream", "queue", "tid")).otherwise("stream"),
        correlation=pl.when(is_joined)
        .then(pl.coalesce("correlation", "connection"))
        .otherwise("correlation"),
    )
    stats: list[Stat] = []
    comms = _build_comms(events.filter(pl.col("process").is_in(list(_COMMUNICATION)) & is_work), stats)
    waits = int((events["cat"] == TASK).sum())
    stats.append(
        Stat("read.ascend_tasks", "info", waits, "waits, notifications and other tasks without work")
    )
    stats += _compare_summaries(events)
    tables: dict[str, Any] = {"events": events.drop("process", "number", "recorded", *_FACTS)}
    if trace.comms.is_empty() and comms.height:
        tables["comms"] = TABLES["comms"].conform(comms.with_row_index("id"))
    return trace.replace(None, **tables).with_stats(stats)


def _compare_summaries(events: pl.DataFrame) -> list[Stat]:
    """Compare the time in the file's own sums (Overlap Analysis) with the time in the events; state what differs."""
    sums = events.filter(pl.col("cat") == SUMMARY)
    kinds = add_kernel_type(events.filter(pl.col("cat") == "kernel"))
    stats = []
    for name, kind in _SUMMARY_KINDS.items():
        stated = _measure_union(sums.filter(pl.col("name") == name), "pid")
        measured = _measure_union(kinds.filter(pl.col("kind") == kind), "device")
        if stated and abs(measured - stated) > max(_SUMMARY_TOLERANCE * stated, 1000):
            example = f"{name}: {stated:,} ns in the file's own sums, {measured:,} ns in its {kind} events"
            stats.append(Stat("read.summary_differs", "error", 1, example))
    return stats


def _measure_union(events: pl.DataFrame, track: str) -> int:
    """Return the time, ns, in which any of the events ran, summed over the values of the column ``track``."""
    parts = events.drop_nulls("dur").partition_by(track)
    ends = ((part["ts"], part["ts"] + part["dur"]) for part in parts)
    return sum(Intervals.of(*times).total for times in ends)


def _read_facts(args: pl.Series) -> pl.DataFrame:
    """Return the columns `_FACTS` of arguments, which are JSON texts."""
    text = pl.col("args").cast(pl.String)
    return args.to_frame("args").select(
        connection=text.str.extract(r'"connection_id": ?"?(\d{1,18})').cast(pl.Int64),
        queue=text.str.extract(r'"Stream Id": ?"?(\d{1,9})').cast(pl.Int64),
        task=text.str.extract(r'"Task Type": ?"([^"]*)"'),
    )


def _choose_categories(events: pl.DataFrame) -> pl.Series:
    """Return the category of each event, by process, task type and name; null leaves it unchanged."""
    keys = events.select("process", "task", "name", is_linked=pl.col("connection").is_not_null())
    distinct = keys.unique().with_columns(chosen=_choose_category())
    return keys.join(distinct, on=keys.columns, how="left", nulls_equal=True, maintain_order="left")["chosen"]


def _choose_category() -> pl.Expr:
    name = pl.col("name").cast(pl.String)
    stated = pl.col("task").str.to_uppercase().fill_null("")
    is_unknown = stated.str.contains(_UNKNOWN_TASK)
    task = pl.when(is_unknown).then(name.str.to_uppercase()).otherwise(stated)
    is_operator = (is_unknown | ~stated.str.contains(_WAIT_TASK)) & ~name.str.contains(_TASK_TYPE)
    on_hardware, in_hccl = (pl.col("process").is_in(list(names)) for names in ((HARDWARE,), _COMMUNICATION))
    return (
        pl.when(pl.col("process").is_in(list(_SUMMARIES)))
        .then(pl.lit(SUMMARY))
        .when(on_hardware & task.str.contains(_COPY_TASK))
        .then(pl.lit("gpu_memcpy"))
        .when(on_hardware & (is_operator | task.str.contains(_COMPUTE_TASK)))
        .then(pl.lit("kernel"))
        .when(on_hardware)
        .then(pl.lit(TASK))
        .when(in_hccl & name.str.contains(_COLLECTIVE))
        .then(pl.lit("kernel"))
        .when(in_hccl)
        .then(pl.lit(COLLECTIVE_TASK))
        .when(pl.col("process").is_in(list(_CALLS)) & pl.col("is_linked"))
        .then(pl.lit("privateuse1_runtime"))
    )


def _build_comms(collectives: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Build rows of comms from collective events: collective, dtype, element count, and the group in the name."""
    args, name = pl.col("args").cast(pl.String), pl.col("name").cast(pl.String)
    count = args.str.extract(r'"count": ?"?(\d{1,15})').cast(pl.Int64)
    rows = collectives.select(
        event="id",
        collective=name,
        pg_name=name.str.extract(_GROUP),
        ranks=pl.lit(None, dtype=pl.String),
        group_size=pl.lit(None, dtype=pl.Int64),
        dtype=args.str.extract(r'"data_type": ?"([^"]*)"').str.to_lowercase(),
        in_nelems=count,
    )
    return normalize_comms(rows, stats)
