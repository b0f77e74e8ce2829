"""Compiled kernels (Triton, torch.compile's Inductor) by time, with the operators that they fuse and their source file.

One row per kernel name and source. backend: as recorded (triton), else inferred from the name. form: pointwise,
reduction, persistent reduction, template (a matrix product or convolution), foreach; null for a kernel that a user
wrote. fused: the operators in the name that Inductor gave it, as it abbreviates them. source: the file of the kernel's
code, from the operator that launched it (kernel_file) or its node of the execution trace; null where neither states it.

Units: ns (mean rounded to integers), percent of the time of all GPU activity. Names: torch/_inductor/codegen/triton.py.
"""

from __future__ import annotations

from typing import Annotated, Any

import polars as pl

from etloom.analyses.helpers import conform_columns, filter_step
from etloom.core.errors import AnalysisError
from etloom.core.schema import parse_distinct
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, select_device_events

SCOPE = "rank"
COLUMNS = {
    "name": pl.String,
    "backend": pl.String,
    "form": pl.String,
    "fused": pl.String,
    "source": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "mean_ns": pl.Int64,
    "total_pct": pl.Float64,
}
_FORMS = {
    "poi": "pointwise",
    "red": "reduction",
    "per": "persistent reduction",
    "tem": "template",
    "for": "foreach",
}
_NAME = r"^triton_(poi|red|per|tem|for)_fused_(.*?)(?:_\d+)?$"
_COMPILED_NAME = r"^triton_"
_FACTS = {"kernel_backend": pl.String, "kernel_file": pl.String}


def analyze(
    trace: Trace, *, step: Annotated[int | None, "Only kernels launched in this step."] = None
) -> pl.DataFrame:
    work = filter_step(trace, select_device_events(trace, "id", "kind", "name", "step", "dur"), step)
    operators = trace.launches.select("device_event", "operator").unique("device_event", keep="first")
    kernels = (
        work.join(operators, left_on="id", right_on="device_event", how="left")
        .join(_read_facts(trace), on="operator", how="left")
        .with_columns(pl.col("name").cast(pl.String))
    )
    is_compiled = pl.col("name").str.contains(_COMPILED_NAME) | (pl.col("kernel_backend") == "triton")
    compiled = kernels.filter(is_compiled.fill_null(False) & (pl.col("kind") != "memory"))
    if compiled.is_empty():
        raise AnalysisError(
            "the trace contains no compiled kernels",
            where=describe_rank(trace),
            remedy="they come from torch.compile or Triton; see kernel-breakdown for all kernels",
        )
    total = work["dur"].sum()
    by_name = pl.when(pl.col("name").str.contains(_COMPILED_NAME)).then(pl.lit("triton"))
    table = (
        compiled.with_columns(backend=pl.coalesce("kernel_backend", by_name), source="kernel_file")
        .group_by("name", "backend", "source")
        .agg(
            pl.len().alias("count"),
            pl.col("dur").sum().alias("total_ns"),
            pl.col("dur").mean().round().alias("mean_ns"),
        )
        .with_columns(
            form=pl.col("name")
            .str.extract(_NAME, 1)
            .replace_strict(_FORMS, default=None, return_dtype=pl.String),
            fused=pl.col("name").str.extract(_NAME, 2),
            total_pct=pl.col("total_ns") / total * 100 if total else pl.lit(None, dtype=pl.Float64),
        )
    )
    return conform_columns(table, COLUMNS).sort("total_ns", "name", "source", descending=[True, False, False])


def _read_facts(trace: Trace) -> pl.DataFrame:
    """Return kernel_backend and kernel_file of the operators that record them: in their args, else on their
    execution-trace node."""

    def parse(args: Any) -> dict[str, str | None]:
        texts = {key: value for key in _FACTS if isinstance(value := args.get(key), str) and value}
        if not texts:
            raise ValueError
        return {key: texts.get(key) for key in _FACTS}

    launching = trace.launches["operator"].drop_nulls().unique()
    operators = trace.events.select("id", "args").filter(pl.col("id").is_in(launching.implode()))
    named = operators.filter(pl.col("args").cast(pl.String).str.contains("kernel_", literal=True))
    recorded = parse_distinct(named, "args", parse, pl.Struct(_FACTS), alias="facts").drop_nulls("facts")
    from_args = recorded.select(pl.col("id").alias("operator"), "facts").unnest("facts")
    nodes = trace.nodes.select("id", *(pl.col(name).cast(pl.String) for name in _FACTS))
    nodes = nodes.filter(
        pl.any_horizontal((pl.col(name).str.len_bytes() > 0).fill_null(False) for name in _FACTS)
    )
    from_nodes = (
        trace.links.select("node", operator="event")
        .join(nodes, left_on="node", right_on="id", how="inner")
        .select("operator", *(pl.when(pl.col(name) != "").then(name).alias(name) for name in _FACTS))
        .unique("operator", keep="first")
    )
    both = from_args.join(from_nodes, on="operator", how="full", coalesce=True, suffix="_node")
    return both.select("operator", *(pl.coalesce(name, f"{name}_node").alias(name) for name in _FACTS))
