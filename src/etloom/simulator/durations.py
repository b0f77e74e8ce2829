"""Durations of the job, its ranks and its steps, and the median step time, computed from times of the graph's
points."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.core import categories
from etloom.core.trace import Trace
from etloom.graphs.graph import Int64Array, PointRole
from etloom.simulator.extremes import Extremes
from etloom.simulator.scenario import Scenario

MAX_RANKS_WITH_STEPS = 64
"""In a larger scenario only these first ranks have a row for each step."""

Z_90 = 1.645
"""Standard deviations from the middle to either end of an interval that holds 90 % of a normal distribution."""

TABLE_SCHEMA: dict[str, Any] = {
    "scope": pl.String,
    "rank": pl.Int64,
    "step": pl.Int64,
    "before_ns": pl.Int64,
    "predicted_ns": pl.Int64,
    "lower_bound_ns": pl.Int64,
    "upper_bound_ns": pl.Int64,
    "change_pct": pl.Float64,
}

ROW_SCHEMA = {"scope": pl.String, "rank": pl.Int64, "step": pl.Int64}


class Durations:
    """Computes the duration in each row of a prediction's table (job, step time, ranks, steps) from times of the
    points.

    Args:
        extremes: the extreme points of the scenario's graph that belong to a rank, and to a step.

    ``rows``: scope, rank, step, in the order of `measure`. The scope "step time" is the median, over steps and ranks,
    of the time from the start of a step to that of the next, or, where the device still works on a step when the host
    begins the next, from end to end; it is missing if the run has fewer than two steps.
    """

    def __init__(self, scenario: Scenario, extremes: Extremes) -> None:
        by_step = extremes.by_step.filter(pl.col("rank") < MAX_RANKS_WITH_STEPS)
        self._by_step = PointSpans(by_step, "rank", "step")
        self._by_rank = PointSpans(extremes.by_rank, "rank")
        self._starts = find_step_starts(scenario)
        spans = {key: row for row, key in enumerate(self._by_step.keys)}
        marks = self._starts.select("rank", "step").rows()
        self._span_rows = np.array([spans.get(mark, -1) for mark in marks], np.int64)
        rows = [("job", None, None)]
        if self._periods(scenario.graph.time).size:
            rows.append(("step time", None, None))
        if len(scenario.template) > 1:
            rows += [("rank", rank, None) for (rank,) in self._by_rank.keys]
        rows += [("step", rank, step) for rank, step in self._by_step.keys]
        self.rows = pl.DataFrame(rows, schema=ROW_SCHEMA, orient="row")
        self._has_ranks = len(scenario.template) > 1

    def measure(self, time: Int64Array) -> Int64Array:
        """Return the duration of each row of ``rows``, int64 ns, from the time of each point of the graph."""
        parts = [np.array([time.max() - time.min()])]
        periods = self._periods(time)
        if periods.size:
            parts.append(np.array([np.median(periods)]).astype(np.int64))
        if self._has_ranks:
            parts.append(self._by_rank.measure(time))
        return np.concatenate([*parts, self._by_step.measure(time)])

    def _periods(self, time: Int64Array) -> Int64Array:
        """Return the time (ns) from each step to the next step of the same rank, see the scope "step time"."""
        starts = time[self._starts["point"].to_numpy()]
        ranks = self._starts["rank"].to_numpy()
        periods = np.diff(starts)
        if self._by_step.keys and periods.size:
            ends = np.where(self._span_rows >= 0, self._by_step.find_ends(time)[self._span_rows], starts)
            lags = (self._span_rows[1:] >= 0) & (ends[:-1] > starts[1:])
            periods = np.where(lags, np.diff(ends), periods)
        return np.asarray(periods[np.diff(ranks) == 0])


class PointSpans:
    """Computes the time from the first to the last point of each group of points, such as a rank or a step of a
    rank.

    ``keys``: of the groups; ``points``: of all groups, one group after the other; ``firsts``: where each group begins.
    """

    def __init__(self, points: pl.DataFrame, *by: str) -> None:
        points = points.sort(*by, maintain_order=True)
        self.keys = points.select(by).unique(maintain_order=True).rows()
        self.points = points["point"].to_numpy()
        lengths = points.group_by(by, maintain_order=True).len()["len"].to_numpy()
        self.firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)

    def measure(self, time: Int64Array) -> Int64Array:
        if not self.keys:
            return np.zeros(0, np.int64)
        starts = np.minimum.reduceat(time[self.points], self.firsts)
        return np.asarray(self.find_ends(time) - starts)

    def find_ends(self, time: Int64Array) -> Int64Array:
        """Return the time of the last point of each group, ns; there must be at least one group."""
        return np.asarray(np.maximum.reduceat(time[self.points], self.firsts))


def find_step_starts(scenario: Scenario) -> pl.DataFrame:
    """Return a table of the step annotations: rank, step, and the graph point at which the annotation starts."""
    graph = scenario.graph
    marks = pl.concat(
        scenario.recorded[rank]
        .compute_once(_list_step_annotations)
        .with_columns(template=pl.lit(rank, pl.Int64))
        for rank in sorted(set(scenario.template.values()))
    )
    is_mark = (graph.role == PointRole.START) & np.isin(graph.event, marks["event"].to_numpy())
    points = np.flatnonzero(is_mark)
    begins = pl.DataFrame(
        {"rank": graph.rank[points], "event": graph.event[points], "point": points.astype(np.int64)}
    )
    template = pl.DataFrame(
        {"rank": list(scenario.template), "template": list(scenario.template.values())},
        schema={"rank": begins["rank"].dtype, "template": pl.Int64},
    )
    starts = begins.join(template, on="rank").join(marks, on=("template", "event"))
    return starts.sort("rank", "step").select("rank", "step", "point")


def _list_step_annotations(trace: Trace) -> pl.DataFrame:
    """Return a table of the outermost annotation of each step of a trace: event (id), step (number)."""
    is_annotation = categories.mask_events(trace.events, categories.ANNOTATION_CATEGORIES)
    marks = trace.events.filter(pl.Series(is_annotation) & pl.col("step").is_not_null())
    first = marks.sort("ts", "id").unique("step", keep="first", maintain_order=True)
    return first.select(event=pl.col("id").cast(pl.Int32), step="step")
