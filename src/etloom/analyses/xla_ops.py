"""XLA operations by time: count, device time, computed operations and bytes, of each operation of a program.

One row per operation (hlo_op) of a program (hlo_module) and its category. count and total_ns are of the kernels, copies
and TPU operations that it ran as; self time, since operations that contain others (while, conditional) are left out.
framework_op: the operation of JAX or TensorFlow that it came from; source: its line, if the profile states it.
flops and bytes are what XLA estimated for one run of the operation, times its runs; of a GPU, they are estimated from
the programs in the file. Null where the profile has none. tflops_per_s and gb_per_s are relative to total_ns.

Units: ns, percent (of total_ns of all rows), FLOP, bytes, TFLOP/s, GB/s. Definition: as xprof's hlo_op_profile.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import check_top, conform_columns, filter_step, percent_of_total
from etloom.core import categories
from etloom.core.errors import AnalysisError
from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

SCOPE = "rank"
COLUMNS = {
    "program": pl.String,
    "operation": pl.String,
    "category": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "total_pct": pl.Float64,
    "mean_ns": pl.Int64,
    "flops": pl.Float64,
    "bytes": pl.Float64,
    "tflops_per_s": pl.Float64,
    "gb_per_s": pl.Float64,
    "framework_op": pl.String,
    "source": pl.String,
}
_TEXTS = {
    "program": ("hlo_module",),
    "operation": ("hlo_op",),
    "category": ("hlo_category",),
    "framework_op": ("name", "tf_op"),
    "source": ("source",),
}
_NO_FRAMEWORK_OP = "XlaModule"
"""Stands for operations without an operation of the framework."""
_NUMBERS = {"flops": ("flops", "model_flops"), "bytes": ("bytes_accessed", "raw_bytes_accessed")}


def analyze(
    trace: Trace,
    *,
    top: Annotated[int, "Number of rows, largest first."] = 20,
    step: Annotated[int | None, "Only operations in this step."] = None,
) -> pl.DataFrame:
    check_top(top)
    work = trace.events.filter(pl.Series(categories.mask_events(trace.events, categories.DEVICE_CATEGORIES)))
    operations = _read_operations(filter_step(trace, work, step))
    if not operations.height:
        raise AnalysisError(
            "the trace contains no XLA operations",
            where=describe_rank(trace),
            remedy="read an .xplane.pb profile of JAX or TensorFlow; see top-ops for PyTorch",
        )
    keys = ("program", "operation", "category")
    table = (
        operations.group_by(keys)
        .agg(
            pl.len().alias("count"),
            pl.col("dur").sum().alias("total_ns"),
            pl.col("dur").mean().round().alias("mean_ns"),
            *(_sum_or_null(name) for name in _NUMBERS),
            pl.col("framework_op", "source").drop_nulls().first(),
        )
        .with_columns(percent_of_total("total_ns"))
    )
    seconds = pl.when(pl.col("total_ns") > 0).then(pl.col("total_ns")) / 1e9
    table = table.with_columns(
        tflops_per_s=pl.col("flops") / seconds / 1e12, gb_per_s=pl.col("bytes") / seconds / 1e9
    )
    return (
        conform_columns(table, COLUMNS)
        .sort("total_ns", *keys, descending=[True, False, False, False])
        .head(top)
    )


def _sum_or_null(name: str) -> pl.Expr:
    """Return an expression for the sum of a column, null if a row has no value, since a partial sum would be wrong."""
    return pl.when(pl.col(name).null_count() == 0).then(pl.col(name).sum()).alias(name)


def _read_operations(work: pl.DataFrame) -> pl.DataFrame:
    """Return duration, operation and other details of the GPU activity that belongs to an XLA operation."""
    fields = {**dict.fromkeys(_TEXTS, pl.String), **dict.fromkeys(_NUMBERS, pl.Float64)}

    def parse(args: object) -> dict[str, object]:
        if not isinstance(args, dict) or not {"hlo_op", "hlo_category", "hlo_module"} & set(args):
            raise ValueError
        texts = {name: _get_first(args, keys, str) for name, keys in _TEXTS.items()}
        return texts | {name: _get_first(args, keys, (int, float)) for name, keys in _NUMBERS.items()}

    parsed = parse_distinct(
        work.select("name", "dur", "args"), "args", parse, pl.Struct(fields), alias="facts"
    )
    rows = parsed.drop_nulls("facts").unnest("facts")
    framework_op = pl.col("framework_op").str.strip_suffix(":")
    return rows.with_columns(
        # On a TPU, the event itself is the operation.
        operation=pl.coalesce("operation", pl.col("name").cast(pl.String)),
        framework_op=pl.when(framework_op != _NO_FRAMEWORK_OP).then(framework_op),
    )


def _get_first(args: dict[str, object], keys: tuple[str, ...], kind: type | tuple[type, ...]) -> object:
    values = (args.get(key) for key in keys)
    return next((value for value in values if isinstance(value, kind) and not isinstance(value, bool)), None)
