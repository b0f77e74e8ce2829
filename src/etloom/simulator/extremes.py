"""Finds the points that can be the first or last of a run, a rank or a step of a rank, however the lags change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.trace import Job
from etloom.graphs.contraction import ContractedGraph, mark_extremes
from etloom.graphs.event_arrays import rows_of_ids
from etloom.graphs.graph import Graph, Int32Array, Int64Array


@dataclass(frozen=True, eq=False)
class Extremes:
    """The points of a graph that can be the first or last of the run, of a rank or of a step, however lags change.

    Attributes:
        mask: of all points: it can be the first or the last one of the run, a rank or a step.
        by_rank: columns point, rank; without points of no single rank.
        by_step: columns point, rank, step, and ``count``, the number of points of the step.
    """

    mask: NDArray[np.bool_]
    by_rank: pl.DataFrame
    by_step: pl.DataFrame


def find_extremes(
    graph: Graph, job: Job, template: Mapping[int, int], lag: Int64Array | None = None
) -> Extremes:
    """Find the points of a graph that can be the first or last of the run, of a rank or of a step, however lags change.

    Args:
        job: the recorded job.
        template: rank of the graph -> recorded rank whose events its points have.
        lag: of each edge, ns, before any change; default: as recorded.
    """
    keys, steps = _number_steps(graph, job, template)
    groups = np.zeros(len(graph), np.int32), graph.rank, steps
    marks = [mark != 0 for mark in mark_extremes(graph, *groups, lag=lag)]
    rank_points, step_points = map(np.flatnonzero, marks[1:])
    return Extremes(
        marks[0] | marks[1] | marks[2],
        pl.DataFrame({"point": rank_points, "rank": graph.rank[rank_points]}),
        pl.DataFrame({"point": step_points, "number": steps[step_points]})
        .join(keys, on="number", maintain_order="left")
        .select("point", "rank", "step", "count"),
    )


def renumber_extremes(extremes: Extremes, contraction: ContractedGraph) -> Extremes:
    """Return ``extremes`` with point numbers of the contracted graph, which must contain all extreme points."""

    def renumber(table: pl.DataFrame) -> pl.DataFrame:
        return table.with_columns(point=contraction.find_positions(table["point"].to_numpy()))

    mask = extremes.mask[contraction.points]
    return Extremes(mask, renumber(extremes.by_rank), renumber(extremes.by_step))


def _number_steps(graph: Graph, job: Job, template: Mapping[int, int]) -> tuple[pl.DataFrame, Int32Array]:
    """Return a table of all ranks' steps (number, rank, step, count of points), and the step number of each point."""
    numbers = np.full(len(graph), -1, np.int32)
    keys, total = [], 0
    for rank, points in graph.group_points():
        if rank not in template:
            continue
        trace, points = job[template[rank]], points[graph.event[points] >= 0]
        rows = rows_of_ids(trace.events, pl.Series(graph.event[points]))
        step = trace.events["step"].gather(rows).cast(pl.Int64)
        steps = step.to_frame("step").drop_nulls().group_by("step").agg(count=pl.len()).sort("step")
        steps = steps.select(
            number=pl.int_range(total, total + pl.len(), dtype=pl.Int32),
            rank=pl.lit(rank, pl.Int64),
            step="step",
            count=pl.col("count").cast(pl.Int64),
        )
        number = step.replace_strict(steps["step"], steps["number"], default=-1)
        numbers[points] = number.fill_null(-1).to_numpy()
        keys.append(steps)
        total += steps.height
    return pl.concat(keys), numbers
