"""Find kernels that a single step runs in addition to those of similar steps: evaluation, image logging, autotuning.

A single step runs eight or more kernels that the other steps do not run, and most other steps are alike. A step is
compared with the steps that call optimizers equally often. Two cases are not additional work: kernels that
several steps add belong to another kind of step (gradient accumulation, a periodic validation), and a step
that repeats most of the usual kernels is a longer step (more micro-batches, longer sequences).

Cost: these kernels.
Confidence: medium.
"""

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
"""Least time of the additional kernels of a step, as share of its usual computation."""
MAX_REPEATED = 2 / 3
"""If a larger share of the names of usual kernels is among the additional ones, the step is a longer one."""
MAX_REPLACED = 0.5
"""If the step lacks more usual kernels than this share of the additional ones, these replace them."""
_OPTIMIZER = r"^Optimizer\.step#"


def find(view: RankView) -> Iterator[Finding]:
    if view.activity_step_count < MIN_STEPS:
        return
    kernels = view.step_computation.select(
        "step", "stream", "name", "ts", "end", "dur", "launch", "launch_ts", "launch_end"
    )
    if kernels["step"].n_unique() < MIN_STEPS:
        return
    updates = view.find_host_events(_OPTIMIZER).group_by("step").agg(updates=pl.len())
    with_updates = kernels.join(updates, on="step", how="left", nulls_equal=False)
    kinds = with_updates.partition_by("updates", include_key=False)
    extra = pl.concat(map(_find_additional, kinds))
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
    """Return a copy of a finding for the host tracks, whose lost time is that of launching the additional kernels."""
    return replace(finding, tracks=HOST, lost=launching, cost_ns=launching.total, parts=(), components=())


def _find_additional(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the additional kernels of single steps that run more kernels, for longer, than most other steps.

    The beginning and the end of such a step that equal a usual step's are left out. Of the kernels between, the first
    ones of each name are returned, as many as the step has more than a usual one.
    """
    steps = (
        kernels.group_by("step").agg(pl.len().cast(pl.Int64).alias("count"), pl.col("dur").sum()).sort("step")
    )
    if steps.height < MIN_STEPS:
        return kernels.clear()
    middle = steps.height // 2
    usual_count, usual_ns = steps["count"].sort()[middle], int(steps["dur"].sort()[middle])
    alike = steps.filter((pl.col("count") - usual_count).abs() < MIN_KERNELS)
    long = steps.filter(
        (pl.col("count") >= usual_count + MIN_KERNELS) & (pl.col("dur") > (1 + MIN_SHARE) * usual_ns)
    )
    if long.is_empty() or 2 * alike.height <= steps.height:
        return kernels.clear()
    template = steps.filter(pl.col("count") <= usual_count).sort("count", descending=True)["step"][0]
    usual = kernels.filter(pl.col("step") == template).sort("ts")
    extra: dict[frozenset[str], list[pl.DataFrame]] = {}
    for step in long["step"]:
        chosen = _compare_step(kernels.filter(pl.col("step") == step).sort("ts"), usual, usual_ns)
        extra.setdefault(frozenset(chosen["name"].cast(pl.String)), []).append(chosen)
    single = [tables[0] for tables in extra.values() if len(tables) == 1]
    return pl.concat([kernels.clear(), *single])


def _compare_step(rows: pl.DataFrame, usual: pl.DataFrame, usual_ns: int) -> pl.DataFrame:
    """Return the kernels that a step runs in addition to those of a usual step; both are lists in order of time."""
    counts = usual.group_by("name").agg(pl.len().cast(pl.Int64).alias("usual"))
    difference = rows.group_by("name").agg(pl.len().cast(pl.Int64).alias("count"))
    difference = difference.join(counts, on="name", how="full", coalesce=True).fill_null(0)
    difference = difference.select("name", "usual", more=pl.col("count") - pl.col("usual"))
    block = _trim_common(rows, usual["name"])
    numbered = block.with_columns(turn=pl.int_range(pl.len()).over("name"))
    chosen = numbered.join(difference, on="name", maintain_order="left")
    chosen = chosen.filter(pl.col("turn") < pl.col("more")).select(rows.columns)
    replaced = -difference["more"].clip(upper_bound=0).sum()
    repeated = difference.filter((pl.col("more") > 0) & (pl.col("usual") > 0)).height / counts.height
    excess_ns = int(rows["dur"].sum()) - usual_ns
    is_additional = (
        MIN_SHARE * usual_ns < chosen["dur"].sum() <= 1.5 * excess_ns
        and replaced <= MAX_REPLACED * chosen.height
        and repeated <= MAX_REPEATED
    )
    return chosen if is_additional else chosen.clear()


def _trim_common(rows: pl.DataFrame, usual: pl.Series) -> pl.DataFrame:
    """Return a step's kernels without those at its begin and end whose names are the same as in the usual step."""
    names, other = rows["name"].cast(pl.String).to_numpy(), usual.cast(pl.String).to_numpy()
    length = min(len(names), len(other))
    differs = np.flatnonzero(names[:length] != other[:length])
    begin = int(differs[0]) if differs.size else length
    differs = np.flatnonzero(names[::-1][: length - begin] != other[::-1][: length - begin])
    end = int(differs[0]) if differs.size else length - begin
    return rows[begin : len(names) - end]
