"""Load imbalance across ranks: each part of the time breakdown, compared over ranks of one kind.

One row per part of temporal-breakdown: its minimum, median and maximum over the ranks, and the ranks with these values.
Ranks with different roles (stages of a pipeline, experts) take different times. Ranks that run the same program are of
one kind. A kind of 17 or more ranks is divided if the times outside of communication of at least a quarter of them
differ from the others. Each kind of two or more ranks has rows of its own, numbered in order of the first rank. kind is
null if all ranks are of one kind, or none has peers: then all ranks are compared.
imbalance_pct is 100 (max / mean - 1): the possible speedup if the part were evenly distributed and the slowest rank
determined the time.

Units: ns, percent. Definition: Pearce et al. (2012), percent imbalance.
"""

from __future__ import annotations

from typing import Annotated

import polars as pl

from etloom.analyses import temporal_breakdown
from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.rank_kinds import KINDS
from etloom.core.errors import AnalysisError
from etloom.core.text import format_ranks
from etloom.core.trace import Job, concat_ranks

SCOPE = "job"
COLUMNS = {
    "kind": pl.Int64,
    "part": pl.String,
    "ranks": pl.Int64,
    "min_ns": pl.Int64,
    "min_rank": pl.Int64,
    "median_ns": pl.Float64,
    "mean_ns": pl.Float64,
    "max_ns": pl.Int64,
    "max_rank": pl.Int64,
    "imbalance_pct": pl.Float64,
}


def analyze(
    job: Job, *, step: Annotated[int | None, "Only this step (default: the whole trace of each rank)."] = None
) -> pl.DataFrame:
    if len(job) < 2:
        raise AnalysisError("imbalance needs at least two ranks", remedy="open the folder with all ranks")
    rows = concat_ranks(job, lambda trace: temporal_breakdown.analyze(trace, step=step))
    rows = rows if step is not None else rows.filter(pl.col("step").is_null())
    host_ranks, device_ranks = (
        rows.filter(basis=basis)["rank"].unique().sort() for basis in ("host", "device")
    )
    if len(host_ranks) and len(device_ranks):
        minority = min(host_ranks, device_ranks, key=len)
        raise AnalysisError(
            f"host times of {format_ranks(host_ranks)} cannot be compared with device times of "
            f"{format_ranks(device_ranks)}",
            remedy="select ranks of one kind with --rank"
            if len(minority) > 1
            else f"exclude rank {minority[0]} with --rank",
        )
    parts = [name for name in temporal_breakdown.COLUMNS if name.endswith("_ns") and name != "start_ns"]
    kinds = KINDS.read(job)
    if kinds["kind"].n_unique() > 1:  # ranks without peers are compared with nobody
        kinds = kinds.drop_nulls("kind")
    rows = rows.join(kinds, on="rank", how="inner", maintain_order="left")
    times = rows.unpivot(parts, index=["rank", "kind"], variable_name="part", value_name="time")
    table = (
        times.with_columns(pl.col("part").str.strip_suffix("_ns"))
        .group_by("kind", "part", maintain_order=True)
        .agg(
            pl.len().alias("ranks"),
            pl.col("time").min().alias("min_ns"),
            pl.col("rank").get(pl.col("time").arg_min()).alias("min_rank"),
            pl.col("time").median().alias("median_ns"),
            pl.col("time").mean().alias("mean_ns"),
            pl.col("time").max().alias("max_ns"),
            pl.col("rank").get(pl.col("time").arg_max()).alias("max_rank"),
        )
    )
    table = table.sort("kind", maintain_order=True)
    imbalance = 100.0 * (pl.col("max_ns") / pl.col("mean_ns") - 1)
    return conform_columns(
        table.with_columns(pl.when(pl.col("mean_ns") > 0).then(imbalance).alias("imbalance_pct")), COLUMNS
    )
