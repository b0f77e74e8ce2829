"""Find steps in which the same kernels take longer than in the fastest step because the device's clock changes.

The same kernels (name, launch geometry, turn in the step) take longer in some of three or more steps, three
quarters of them by 1 % or more: the clock of the device changes.

Cost: the additional time.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom._native import number_pairs
from etloom.analyses.findings.finding import DEVICE, Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.core import text_codes
from etloom.core.arrays import find_unique, take_rows, to_array, to_series
from etloom.core.intervals import Intervals
from etloom.core.text import count_noun

SCOPE = "rank"
MIN_STEPS = 3
MIN_KERNELS = 50
"""Kernels that every step repeats; fewer may vary together by chance."""
MIN_SHARE = 0.5
"""Least time of the repeated kernels, as share of all computation."""
MIN_SLOWDOWN = 0.01
"""In a part that counts, at least three quarters of the kernels take longer by this share: one cause slows them all."""
PARTS = 4
"""Parts of a step that are compared, each of as many kernels: the clock may change within a step."""


def find(view: RankView) -> Iterator[Finding]:
    if view.activity_step_count < MIN_STEPS:
        return
    kernels = view.step_computation.sort("ts")
    turns, sizes = _count_turns(to_array(kernels["step"], -1))
    kernels = kernels.hstack([to_series(turns * PARTS // sizes, "part")])
    parts = _compare_steps(view, kernels)
    slow = parts.filter(pl.col("low") >= 1 + MIN_SLOWDOWN)
    if slow.is_empty():
        return
    lost = kernels.join(slow.select("step", "part", "ratio"), on=("step", "part")).with_columns(
        lost=pl.col("dur") * (1 - 1 / pl.col("ratio"))
    )
    by_step = lost.group_by("step").agg(pl.col("lost").sum()).sort("lost", "step", descending=(True, False))
    times = Intervals.of(lost["ts"], lost["end"])
    worst = lost.sort("lost", "ts", descending=(True, False)).row(0, named=True)
    cost_ns = min(round(float(lost["lost"].sum())), times.total)
    percent = 100 * (slow["ratio"].top_k(1).item() - 1)
    yield Finding(
        f"the same kernels take up to {percent:.0f} % longer in {count_noun(by_step.height, 'step')} "
        f"of {parts['step'].n_unique()} than in the fastest one: the device's clock changes",
        cost_ns,
        "medium",
        "check temperature, power limit and clocks over time (nvidia-smi -q -d PERFORMANCE, rocm-smi); lock the clocks "
        "for comparisons (nvidia-smi -lgc); other programs on the device have the same effect",
        times,
        DEVICE,
        lost.height,
        step=by_step["step"][0],
        stream=worst["stream"],
        name=str(worst["name"]),
        event=worst["launch"],
        start_ns=worst["ts"],
        end_ns=worst["end"],
        in_steps_ns=round(cost_ns * (times & view.step_intervals).total / max(1, times.total)),
    )


def _count_turns(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the number of earlier rows of its group, and the number of all rows of the group."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(groups[order]) != 0)[: groups.size])
    counts = np.diff(np.append(starts, groups.size))
    turns, sizes = np.empty((2, groups.size), np.int64)
    turns[order] = np.arange(groups.size) - np.repeat(starts, counts)
    sizes[order] = np.repeat(counts, counts)
    return turns, sizes


def _compare_steps(view: RankView, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return ``ratio`` and ``low`` per step and part of a step: median and lower quartile of kernel durations relative
    to the fastest step's.

    Compared are kernels of one name and launch geometry, by their turn in the step; empty if they are too few.
    """
    empty = pl.DataFrame(schema={"step": pl.Int64, "part": pl.Int64, "ratio": pl.Float64, "low": pl.Float64})
    step_count = kernels["step"].n_unique()
    if step_count < MIN_STEPS:
        return empty
    geometry = [name for name in view.trace.kernels.columns if name.startswith(("grid_", "block_"))]
    rows, _ = find_unique(to_array(view.trace.kernels["event"], -1), to_array(kernels["id"], -1))
    launched = take_rows(view.trace.kernels.select(geometry), rows)
    program = text_codes.read_codes(kernels["name"]).astype(np.int64)
    for column in (kernels["stream"], *launched.get_columns()):
        program = number_pairs(program, to_array(column, np.iinfo(np.int64).max)).astype(np.int64)
    turns, _ = _count_turns(number_pairs(to_array(kernels["step"], -1), program))
    kernels = kernels.hstack([to_series(program, "program"), to_series(turns, "turn")])
    kernel = ["program", "turn"]
    repeated = kernels.filter(pl.len().over(kernel) == step_count)
    totals = repeated.group_by("step").agg(pl.col("dur").sum()).sort("dur", "step")
    if repeated.height < MIN_KERNELS * step_count or totals["dur"].sum() < MIN_SHARE * int(
        kernels["dur"].sum()
    ):
        return empty
    fastest = repeated.filter(pl.col("step") == totals["step"][0]).select(*kernel, usual="dur")
    ratio = pl.col("dur") / pl.col("usual")
    compared = repeated.join(fastest, on=kernel).filter(pl.col("usual") > 0)
    by_part = compared.group_by("step", "part").agg(ratio=ratio.median(), low=ratio.quantile(0.25))
    return by_part.select(empty.columns).sort("step", "part")
