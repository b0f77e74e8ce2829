"""A few steps run kernels that the others do not: evaluation, logging of images, an update every so many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, describe_place, sum_places
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import Intervals
from etloom.core.text import count_noun

SCOPE = "rank"
MIN_STEPS = 3
MIN_KERNELS = 8
MIN_SHARE = 0.02
"""Share of a step's usual computation that its additional kernels take at least."""


def find(view: RankView) -> Iterator[Finding]:
    kernels = view.activities.filter(
        pl.col("cat").is_in(["kernel", "Kernel"])
        & (pl.col("kind") == "computation")
        & pl.col("step").is_not_null()
    ).select("step", "stream", "name", "ts", "end", "dur", "launch", "launch_ts", "launch_end")
    extra = _find_additional(kernels)
    if extra.is_empty():
        return
    steps = extra["step"].unique().sort()
    first = " (the first step: may be warm-up)" if steps.to_list() == [kernels["step"].min()] else ""
    for finding in sum_places(
        view,
        extra.select("step", "stream", "name", "end", start="ts", cost_ns="dur", event="launch"),
        lambda row: (
            f"{count_noun(row['count'], 'kernel')}{describe_place(row)} more than in the other steps, in "
            f"{count_noun(len(steps), 'step')} of {kernels['step'].n_unique()}{first}"
        ),
        confidence="medium",
        advice="if this is evaluation or logging, do it less often or on fewer samples, and leave these steps out of "
        "comparisons; in the first step it is usually the choice of algorithms (cudnn.benchmark, autotuning)",
        tracks=DEVICE,
    ):
        # Without the work, the host does not launch it either.
        spans = extra.group_by("step").agg(pl.col("launch_ts").min(), pl.col("launch_end").max()).drop_nulls()
        launching = Intervals.of(spans["launch_ts"], spans["launch_end"])
        yield replace(finding, components=(finding, _as_host(finding, launching)))


def _as_host(finding: Finding, launching: Intervals) -> Finding:
    """Return the part of a finding that is on the host."""
    return replace(finding, tracks=HOST, lost=launching, cost_ns=launching.total, parts=(), components=())


def _find_additional(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels of steps that run more kernels, for longer, than half of the steps.

    In such a step, those count between its first and last kernel that differ from a usual step's, as many of each name
    as are more than usual.
    """
    steps = kernels.group_by("step").agg(pl.len().alias("count"), pl.col("dur").sum()).sort("step")
    if steps.height < MIN_STEPS:
        return kernels.clear()
    middle = steps.height // 2
    usual_count, usual_ns = steps["count"].sort()[middle], int(steps["dur"].sort()[middle])
    long = steps.filter(
        (pl.col("count") >= usual_count + MIN_KERNELS) & (pl.col("dur") > (1 + MIN_SHARE) * usual_ns)
    )
    if long.is_empty():
        return kernels.clear()
    template = steps.filter(pl.col("count") <= usual_count).sort("count", descending=True)["step"][0]
    usual = kernels.filter(pl.col("step") == template).sort("ts")
    counts = usual.group_by("name").agg(pl.len().alias("usual"))
    extra = []
    for step in long["step"]:
        rows = kernels.filter(pl.col("step") == step).sort("ts")
        block = _trim_common(rows, usual["name"])
        numbered = block.with_columns(turn=pl.int_range(pl.len()).over("name"))
        more = rows.group_by("name").agg(pl.len().alias("count")).join(counts, on="name", how="left")
        more = more.select("name", more=pl.col("count") - pl.col("usual").fill_null(0).cast(pl.Int64))
        chosen = numbered.join(more, on="name", maintain_order="left").filter(pl.col("turn") < pl.col("more"))
        excess_ns = int(rows["dur"].sum()) - usual_ns
        # Kernels that replace others (other shapes) are not additional.
        if MIN_SHARE * usual_ns < chosen["dur"].sum() <= 1.5 * excess_ns:
            extra.append(chosen.select(kernels.columns))
    return pl.concat(extra) if extra else kernels.clear()


def _trim_common(rows: pl.DataFrame, usual: pl.Series) -> pl.DataFrame:
    """Return the rows without those at the beginning and the end that equal the usual names."""
    names, other = rows["name"].cast(pl.String).to_numpy(), usual.cast(pl.String).to_numpy()
    length = min(len(names), len(other))
    differs = np.flatnonzero(names[:length] != other[:length])
    begin = int(differs[0]) if differs.size else length
    differs = np.flatnonzero(names[::-1][: length - begin] != other[::-1][: length - begin])
    end = int(differs[0]) if differs.size else length - begin
    return rows[begin : len(names) - end]
