"""Find ranks whose experts (mixture of experts) compute longer than those of the other ranks in the same step.

Steps in which the experts (mixture of experts) of one rank compute at least 10 % longer than the mean of the
ranks.

Cost: the excess.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import DEVICE, Finding, format_times
from etloom.analyses.findings.job_view import JobView
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals

SCOPE = "job"
_EXPERTS = r"(?i)moe|expert|grouped_?gemm|group_gemm|_matmul_ogs"
_NO_EXPERTS = r"(?i)rout|align|dispatch|combine|topk"
MIN_EXCESS = 0.1
"""Least excess of the time of a rank's experts over the mean of the ranks, as share."""


def find(views: JobView) -> Iterator[tuple[int, Finding]]:
    """Yield a finding for each rank whose experts take longest in some steps, summed over these steps."""
    if len(views) < 2:
        return
    sums = []
    for rank in views:
        sums.append(views[rank].compute_once(sum_experts).with_columns(rank=pl.lit(rank)))
    table = pl.concat(sums).filter(pl.len().over("step") == len(views))
    mean = pl.col("dur").mean().over("step")
    late = table.with_columns(excess=(pl.col("dur") - mean).round().cast(pl.Int64)).filter(
        pl.col("excess") > MIN_EXCESS * mean, pl.col("dur") == pl.col("dur").max().over("step")
    )
    for (rank,), rows in sorted(late.group_by("rank")):
        worst = rows.row(rows["excess"].arg_max() or 0, named=True)
        yield (
            rank,
            Finding(  # type: ignore[misc]
                f"the experts of rank {rank} take longest {format_times(rows.height)}, up to "
                f"{worst['excess'] / 1e6:,.2f} ms longer than the mean of {len(views)} ranks",
                int(rows["excess"].sum()),
                "medium",
                "balance tokens over experts (auxiliary loss) or experts over ranks (redundant experts, EPLB)",
                Intervals.of(rows["end"] - rows["excess"], rows["end"]),
                DEVICE,
                rows.height,
                step=worst["step"],
                start_ns=worst["ts"],
                end_ns=worst["end"],
            ),
        )


def sum_experts(view: RankView) -> pl.DataFrame:
    """Return the total duration (ns), first start and last end of the experts' kernels in each step."""
    kernels = view.kernels.drop_nulls("step")
    is_expert = view.match_activities(kernels, _EXPERTS) & ~view.match_activities(kernels, _NO_EXPERTS)
    return (
        kernels.filter(is_expert)
        .group_by("step")
        .agg(pl.col("dur").sum(), pl.col("ts").min(), pl.col("end").max())
    )


RANK_TABLES = (sum_experts,)
"""Tables of a rank that do not depend on others."""
