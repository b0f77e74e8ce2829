"""Find long sequences of tiny operators on a host thread, as loops over elements or parameters produce them."""

from __future__ import annotations

import polars as pl

from etloom.analyses.findings.host_calls import select_outermost
from etloom.analyses.findings.rank_view import RankView
from etloom.core import categories, nesting

TINY_NS = 50_000
"""An operator that usually takes less computes little: most of its time is overhead."""
MAX_PAUSE_NS = 5_000_000
"""A longer time between two operators ends a run."""
MIN_RUN_LENGTH = 64
MIN_INTERRUPTION_NS = 500_000
"""A tiny operator that takes this much longer than usual was interrupted; that time is not the loop's."""
MIN_REPETITIONS = 12
"""Number of operators per name from which a run counts as a loop, not as the layers of a small model."""
_SCHEMA = dict.fromkeys(
    ("step", "event", "read_event", "start", "end", "count", "reads", "cost_ns"), pl.Int64
) | {
    "name": pl.String,
    "read_name": pl.String,
}
OPTIMIZER_STEP = r"^Optimizer\.step#"
READS_VALUE = r"^aten::(?:item|_local_scalar_dense|is_nonzero)$"


def find_operator_runs(view: RankView) -> pl.DataFrame:
    """Return the sequences of tiny operators on host threads, for a rank without GPU activity.

    Returns:
        One row per run: step, name (of its most frequent operator), event (its first), start, end, cost_ns (all but
        one operator's share of its time), count (operators), reads (operators that read a value of a tensor),
        read_name and read_event (the most frequent of these, and the first).
    """
    if view.activity.basis == "device":
        return pl.DataFrame(schema=_SCHEMA)
    calls = select_outermost(view.find_host_events("", categories.OPERATOR_CATEGORIES))
    usual = pl.col("dur").median().over("name")
    is_tiny = (usual < TINY_NS) & ~categories.is_communication()
    interruption = (
        pl.when(pl.col("dur") - usual > MIN_INTERRUPTION_NS).then(pl.col("dur") - usual).otherwise(0)
    )
    thread = ("pid", "tid")
    ordered = calls.sort(*thread, "ts").with_columns(tiny=is_tiny, interrupted=interruption)
    optimizers = view.find_host_events(OPTIMIZER_STEP, categories.ANNOTATION_CATEGORIES)
    around = nesting.find_innermost(optimizers["ts"], optimizers["end"], ordered["ts"])
    ordered = ordered.with_columns(optimizer=pl.Series(around))
    pause = pl.col("ts") - pl.col("end").shift(1).over(thread)
    ordered = ordered.with_columns(
        run=pl.struct(*thread, "step", "tiny", "optimizer").rle_id()
        + (pause > MAX_PAUSE_NS).fill_null(False).cum_sum()
    )
    reads_value = pl.col("name").str.contains(READS_VALUE)
    runs = (
        ordered.filter("tiny")
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("step").first(),
            pl.col("name").mode().sort().first(),
            pl.col("id").first().alias("event"),
            pl.col("ts").min().alias("start"),
            pl.col("end").max(),
            pl.len().alias("count"),
            pl.col("interrupted").sum(),
            pl.col("name").n_unique().alias("names"),
            reads_value.sum().alias("reads"),
            pl.col("name").filter(reads_value).mode().sort().first().alias("read_name"),
            pl.col("id").filter(reads_value).first().alias("read_event"),
        )
        .filter((pl.col("count") >= MIN_RUN_LENGTH) & (pl.col("count") >= MIN_REPETITIONS * pl.col("names")))
    )
    cost = (pl.col("end") - pl.col("start") - pl.col("interrupted")) * (1 - 1 / pl.col("count"))
    return runs.with_columns(cost_ns=cost.round().cast(pl.Int64)).drop("run", "names", "interrupted")
