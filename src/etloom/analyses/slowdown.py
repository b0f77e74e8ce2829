"""Slowdown of a job by stragglers: its step time relative to the same job without slow operations.

The ideal step time is computed with the time of its peers for every operation; the dependencies stay. slowdown is the
step time divided by the ideal step time: 1.25 means that slow operations add a quarter. One row per:

- job: all operations as recorded.
- type: only operations of the type as recorded, all others ideal.
- worker: only operations of the rank as recorded. stage: only operations of the pipeline stage (the ranks that run the
  same program). data rank: only operations of the data-parallel rank.
- slowest workers: only operations of the slowest 3 % of ranks, at least one, as recorded; the item names the ranks.
- step: the step as recorded.

- time_ns, ideal_ns: step time (mean over steps) with the item as recorded, and ideal.
- recorded_ns: the recorded step time. Its difference from time_ns of the job is what the dependencies do not explain.
- explained_pct: part of the job's slowdown that disappears if the item alone becomes ideal. Items overlap, so the sum
  may exceed 100. Negative if the job becomes slower, because the item is faster than its peers. Null if the job is not
  slower than ideal.

For a pipeline operation trace, the peers are all operations of the type in all ranks and steps, and the ideal is the
mean of computation and the median of the transfer times of communication. This is the definition of "Understanding
Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI 2025); its M_W is explained_pct of the
slowest workers, its M_S explained_pct of the last stage.

For linked traces, the peers are the same operation, call or kernel in the same place of every step, on the ranks that
run the same program, and the same collective with the same size; the ideal is the lower median. Unlike above, stages
are not compared with each other. The type of a communication is its collective. Other work of a GPU has the
type computation, memory or waits; work of the host has the type host.

Units: ns, percent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, TypeAlias

import numpy as np
import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.pipeline_schedule import has_operations
from etloom.analyses.helpers.what_if_model import OperationModel, WhatIfModel
from etloom.core.errors import AnalysisError, UnknownName
from etloom.core.trace import Job

SCOPE = "job"
COLUMNS = {
    "by": pl.String,
    "item": pl.String,
    "slowdown": pl.Float64,
    "explained_pct": pl.Float64,
    "time_ns": pl.Int64,
    "ideal_ns": pl.Int64,
    "recorded_ns": pl.Int64,
}
MAX_SIMULATED_EVENTS = 2_000_000_000
"""Events of all ranks times ranks: each rank takes two simulations of all, about 100 ns per event."""
ITEMS = ("job", "type", "worker", "slowest workers", "stage", "data rank", "step")
_BY_WORKER = ("worker", "slowest workers")
_SLOWEST_PERCENT = 3
_JOB = "all"

Row: TypeAlias = "tuple[str, str, float, float | None]"


def analyze(
    job: Job,
    *,
    by: Annotated[
        str | None,
        "Show only these rows: job, type, worker, slowest workers, stage, data rank or step (default: "
        "all). worker and slowest workers are refused where events times ranks exceed 2,000,000,000, "
        "since each rank is simulated alone.",
    ] = None,
) -> pl.DataFrame:
    if by is not None and by not in ITEMS:
        raise UnknownName("kind of item", by, ITEMS, option="by")
    model = _build_model(job, by)
    ideal, times = model.simulate([np.zeros(model.size, bool), np.ones(model.size, bool)])
    recorded = float(model.span_ns.mean())
    rows: list[Row] = [("job", _JOB, float(times.mean()), 100.0)]
    for kind in ("type", "worker", "stage", "data rank"):
        if by in (None, kind) or (kind == "worker" and by in _BY_WORKER):
            items = model.list_items(kind)
            compared = _compare_items(model, kind, items, ideal, times)
            rows += sorted(compared, key=lambda row: -row[2])
            if kind == "worker":
                slowest = _join_slowest(items, rows[-len(items) :])
                rows += _compare_items(model, "slowest workers", slowest, ideal, times)
    table = pl.DataFrame(rows, schema=["by", "item", "time_ns", "explained_pct"], orient="row").with_columns(
        ideal_ns=ideal.mean(), recorded_ns=recorded
    )
    steps = pl.DataFrame(
        {
            "by": "step",
            "item": [str(step) for step in model.steps],
            "time_ns": times,
            "explained_pct": None,
            "ideal_ns": ideal,
            "recorded_ns": model.span_ns,
        },
        schema_overrides={"explained_pct": pl.Float64},
    )
    both = pl.concat([table, steps], how="vertical_relaxed").with_columns(
        slowdown=pl.when(pl.col("ideal_ns") > 0).then(pl.col("time_ns") / pl.col("ideal_ns"))
    )
    if by is not None:
        both = both.filter(pl.col("by") == by)
    return conform_columns(both.with_columns(pl.col("^.*_ns$").round()), COLUMNS)


def _build_model(job: Job, by: str | None) -> WhatIfModel:
    if has_operations(job):
        return OperationModel(job)
    from etloom.analyses.helpers.graph_model import GraphModel

    if len(job) < 2:
        raise AnalysisError("a slowdown needs at least two ranks", remedy="open the folder with all ranks")
    events = sum(trace.rows("events") for trace in job.values())
    if by in (None, *_BY_WORKER) and events * len(job) > MAX_SIMULATED_EVENTS:
        raise AnalysisError(
            f"the slowdown by each of {len(job):,} ranks takes {2 * len(job):,} simulations of {events:,} events",
            remedy="choose --by job, type, stage or step; etloom analyze stragglers compares ranks",
        )
    return GraphModel(job)


def _join_slowest(items: Mapping[str, np.ndarray], rows: list[Row]) -> dict[str, np.ndarray]:
    """Return a mask of all operations of the slowest workers, by their ranks; ``rows``: of each worker, slowest first.

    Of equal workers the ones with lower ranks count as slower.
    """
    count = -(-_SLOWEST_PERCENT * len(items) // 100)
    if not count:
        return {}
    slowest = sorted(rows, key=lambda row: (-row[2], int(row[1])))[:count]
    ranks = sorted((row[1] for row in slowest), key=int)
    return {", ".join(ranks): np.logical_or.reduce([items[rank] for rank in ranks])}


def _compare_items(
    model: WhatIfModel, kind: str, items: Mapping[str, np.ndarray], ideal: np.ndarray, times: np.ndarray
) -> Iterator[Row]:
    """Yield a table row (by, item, time_ns, explained_pct) for each item of a kind, such as each worker."""
    if not items:
        return
    masks = list(items.values())
    only = model.simulate(masks).mean(axis=1)
    without = model.simulate([~mask for mask in masks]).mean(axis=1)
    excess = times.mean() - ideal.mean()
    for item, time, rest in zip(items, only, without, strict=True):
        yield kind, item, float(time), float(100 * (times.mean() - rest) / excess) if excess > 0 else None
