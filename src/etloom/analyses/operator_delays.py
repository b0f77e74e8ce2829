"""Launch delays of operators: from operator start to launch call, and from there to the kernel.

One row per operator and sequence of kernels launched by its calls, in launch order. count: number of calls that
launched exactly these. launch_delay_ns: from the start of the operator to its first launch call. runtime_delay_ns: from
that call to the start of the first kernel. Both are means over the calls; launch_delay_ns is null for a captured
operator, which did not run at the replay that launched its kernels. device_ns: sum of all their kernels.

The operator of a launch is the innermost one around the call on its thread; if there is none, the innermost annotation
(Optimizer.step) except steps.

Units: ns. Definition: HolisticTraceAnalysis get_aten_op_kernels_and_delay, which uses any operator that covers the
launch in time, even on another thread, and only aten operators.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses.helpers import Step, conform_columns, filter_step
from etloom.analyses.helpers.launched_work import find_annotations, select_launched_work
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.categories import CAPTURED, mask_events
from etloom.core.trace import Trace

SCOPE = "rank"
EMPTY_MESSAGE = "no GPU activity was launched inside an operator; see `launches` for the calls"
COLUMNS = {
    "operator": pl.String,
    "kernels": pl.String,
    "kernel_count": pl.Int64,
    "count": pl.Int64,
    "launch_delay_ns": pl.Float64,
    "runtime_delay_ns": pl.Float64,
    "device_ns": pl.Int64,
}
KERNEL_SEPARATOR = " -> "


def analyze(
    trace: Trace,
    *,
    operator: Annotated[str | None, "Only operators with this name."] = None,
    step: Step = None,
) -> pl.DataFrame:
    work = select_launched_work(trace, "id", "step", "name", "ts", "dur", "launch", "launch_ts", "operator")
    annotations = take_rows(trace.events["id"], find_annotations(trace, work["launch"]))
    work = work.with_columns(pl.coalesce("operator", annotations))
    work = work.drop_nulls(["operator", "launch_ts"]).sort("launch_ts", "ts", "id")
    calls = filter_step(trace, work, step)
    around = take_rows(trace.events.select("name", "cat", "ts"), rows_of_ids(trace.events, calls["operator"]))
    is_captured = pl.Series(mask_events(around, CAPTURED))
    calls = calls.with_columns(
        operator_name=around["name"], operator_ts=around["ts"], is_captured=is_captured
    )
    # Each replay of a captured operator is a call.
    calls = calls.with_columns(replay=pl.when("is_captured").then("launch"))
    calls = calls.with_columns(operator_ts=pl.when(~pl.col("is_captured")).then("operator_ts"))
    if operator is not None:
        calls = calls.filter(pl.col("operator_name") == operator)
    calls = calls.group_by("operator", "replay", maintain_order=True).agg(
        pl.col("operator_name").first(),
        pl.col("name"),
        launch_delay=pl.col("launch_ts").first() - pl.col("operator_ts").first(),
        runtime_delay=pl.col("ts").first() - pl.col("launch_ts").first(),
        device=pl.col("dur").sum(),
    )
    table = (
        calls.with_columns(sequence=pl.col("name").list.eval(pl.element().to_physical()))
        .group_by("operator_name", "sequence", maintain_order=True)
        .agg(
            pl.col("name").first(),
            pl.len().alias("count"),
            pl.col("launch_delay").mean().alias("launch_delay_ns"),
            pl.col("runtime_delay").mean().alias("runtime_delay_ns"),
            pl.col("device").sum().alias("device_ns"),
        )
        .with_columns(
            kernel_count=pl.col("name").list.len(),
            kernels=pl.col("name").list.eval(pl.element().cast(pl.String)).list.join(KERNEL_SEPARATOR),
            operator=pl.col("operator_name").cast(pl.String),
        )
        .sort("count", "device_ns", "operator", "kernels", descending=(True, True, False, False))
    )
    return conform_columns(table, COLUMNS)
