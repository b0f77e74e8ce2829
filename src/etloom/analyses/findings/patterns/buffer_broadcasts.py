"""Find DistributedDataParallel's broadcasts of the model's buffers, on the host and on the device, in each forward.

DistributedDataParallel broadcasts the buffers of the model at the begin of two or more forwards.

Cost: the host from the first of these operators to the first other one, and what it launches meanwhile.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.findings.finding import Finding, format_times
from etloom.analyses.findings.rank_view import RankView
from etloom.analyses.findings.removed_work import sum_removed
from etloom.core import categories

SCOPE = "rank"
MIN_FORWARDS = 2
"""The first forward of a model may broadcast what later ones do not."""
_FORWARD = r"^DistributedDataParallel\.forward"
_BROADCAST = r"^c10d::_?broadcast"
_SYNCHRONIZATION = rf"{_BROADCAST}|^aten::(?:_?(?:un)?flatten_dense_tensors|cat|copy_)$|^record_param_comms$"
"""Operators of which the synchronization of buffers consists."""
_ADVICE = (
    "DistributedDataParallel(..., broadcast_buffers=False), if each rank may keep its own buffers (running statistics "
    "of batch norms) or has the same ones anyway (SyncBatchNorm)"
)


def find(view: RankView) -> Iterator[Finding]:
    regions = find_regions(view)
    if regions.height >= MIN_FORWARDS:
        title = (
            "DistributedDataParallel broadcasts the buffers of the model before its forward, "
            f"{format_times(regions.height)}"
        )
        yield from sum_removed(view, regions, title, confidence="medium", advice=_ADVICE)


def find_regions(view: RankView) -> pl.DataFrame:
    """Return a row per forward that begins with broadcasts of buffers, as for `sum_places`: until its first other
    operator."""
    if not view.match_events(_BROADCAST).any():
        return pl.DataFrame(schema={"start": pl.Int64, "end": pl.Int64})
    forwards = view.find_host_events(_FORWARD, categories.ANNOTATION_CATEGORIES)
    operators = view.find_host_events("", categories.OPERATOR_CATEGORIES)
    children = operators.join(forwards.select(forward="id"), left_on="parent", right_on="forward").sort("ts")
    is_part = pl.col("name").str.contains(_SYNCHRONIZATION)
    is_first = is_part.cast(pl.Int8).cum_min().over("parent") == 1
    return (
        children.filter(is_first)
        .filter(pl.col("name").str.contains(_BROADCAST).any().over("parent"))
        .group_by("parent", maintain_order=True)
        .agg(
            start=pl.col("ts").first(),
            end=pl.col("end").max(),
            event=pl.coalesce(
                pl.col("id").filter(pl.col("name").str.contains(_BROADCAST)).first(), pl.col("id").first()
            ),
            step=pl.col("step").first(),
        )
        .select(
            "start",
            "end",
            "event",
            "step",
            name=pl.lit("c10d::broadcast_ with flattening and copies"),
            cost_ns=pl.col("end") - pl.col("start"),
        )
    )
