"""FLOPs and bytes of XLA's operations, which the arguments of their kernels state (`etloom.formats.xplane.programs`).

The first kernel of an operation states the cost of a run of it; the other kernels of the run state 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace

_OPERATION = {
    "operation": pl.String,
    "program": pl.String,
    "operation_flops": pl.Int64,
    "operation_bytes": pl.Int64,
    "operation_dtype": pl.String,
}


def has_operations(trace: Trace) -> bool:
    """Return whether kernels of a trace may state the XLA operation that they are part of."""
    return "xplane" in (trace.meta.get("formats") or ())


def find_runs(trace: Trace, work: pl.DataFrame) -> NDArray[np.int64]:
    """Return for each kernel the id of the first one of the same run of its XLA operation, -1 without an operation."""
    stated = _read_operations(trace, work["id"]).with_columns(id=pl.Series(work["id"], dtype=pl.Int64))
    tracks = take_rows(trace.events.select("device", "stream", "ts"), rows_of_ids(trace.events, work["id"]))
    table = stated.hstack(tracks).with_row_index("place").sort("device", "stream", "ts", "place")
    key = ("device", "stream", "program", "operation")
    is_same = pl.all_horizontal(pl.col(name).eq_missing(pl.col(name).shift(1)) for name in key)
    continues = is_same & (pl.col("operation_flops") == 0) & (pl.col("operation_bytes") == 0)
    runs = table.with_columns(run=pl.when(~continues.fill_null(False)).then("id").forward_fill())
    runs = runs.with_columns(pl.when(pl.col("operation").is_not_null()).then("run").otherwise(-1))
    result: NDArray[np.int64] = runs.sort("place")["run"].to_numpy()
    return result


def add_operation_costs(trace: Trace, units: pl.DataFrame) -> pl.DataFrame:
    """Fill in the name and the cost of units that are runs of XLA operations (row -1, replay: their first kernel)."""
    is_run = (pl.col("row") < 0) & (pl.col("replay") >= 0)
    if not has_operations(trace) or not units.select(is_run.any()).item():
        return units
    ids = units.select(pl.when(is_run).then("replay").otherwise(-1)).to_series()
    flops, number = pl.col("operation_flops"), pl.col("operation_bytes")
    return (
        units.hstack(_read_operations(trace, ids))
        .with_columns(
            name=pl.coalesce(pl.col("name").cast(pl.String), "operation"),
            flops=pl.coalesce("flops", flops),
            model_flops=pl.coalesce("model_flops", flops),
            bytes=pl.coalesce("bytes", number),
            dtype=pl.coalesce("dtype", "operation_dtype"),
        )
        .drop(*_OPERATION)
    )


def _read_operations(trace: Trace, ids: pl.Series) -> pl.DataFrame:
    """Return what the arguments of events state about their XLA operation; nulls if nothing."""
    args = take_rows(trace.events.select("args"), rows_of_ids(trace.events, ids))
    parsed = parse_distinct(args, "args", _parse, pl.Struct(_OPERATION))
    return parsed.unnest("args")


def _parse(args: Any) -> dict[str, Any]:
    if not isinstance(args, dict):
        raise ValueError
    return {
        "operation": _get_text(args, "hlo_op"),
        "program": _get_text(args, "hlo_module"),
        "operation_flops": _get_number(args, "flops"),
        "operation_bytes": _get_number(args, "bytes_accessed"),
        "operation_dtype": _get_text(args, "element_type"),
    }


def _get_text(args: dict[str, Any], key: str) -> str | None:
    value = args.get(key)
    return value if isinstance(value, str) else None


def _get_number(args: dict[str, Any], key: str) -> int | None:
    value = args.get(key)
    return value if type(value) is int and 0 <= value < 1 << 56 else None
