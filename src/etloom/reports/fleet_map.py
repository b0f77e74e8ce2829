"""The heat map of ranks: how much longer each rank takes per step, without communication, than other ranks.

A rank of a fleet is compared with the median of all ranks. The median of few ranks depends on each of them: of two it
is the mean of both, from which both deviate alike. So a rank of few is compared with the median of the other ranks, of
two ranks with the other one.

Its size does not grow with the ranks: neighbors share a row and a column, which then shows the slowest of them.
"""

from __future__ import annotations

import base64
import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.helpers.rank_kinds import MIN_EXCESS, MIN_FLEET, divide_by_time
from etloom.core.text import count_noun, format_duration, format_ranges
from etloom.reports.html_tables import render_table
from etloom.reports.page import fill_template, read_asset

MIN_RANKS, MIN_STEPS = 2, 2
"""Runs with fewer ranks, or of fewer than `MIN_FLEET` ranks with fewer steps, have no map."""
MAX_ROWS, MAX_COLUMNS = 512, 128
MAX_OUTLIERS = 50
"""Outliers that are listed."""
DRAWN_OUTLIERS = 6
"""Outliers whose timelines are drawn, next to that of a typical rank."""
OUTLIER = 5.0
"""An outlier exceeds the median rank of its kind by `MIN_EXCESS` and by this many standard deviations, estimated from
the median deviation."""
_NO_DATA, _LEVELS = 255, 254
_NORMAL = 1.4826  # standard deviations per median deviation, of a normal distribution


@dataclass(frozen=True)
class FleetMap:
    """The time of each rank outside communication, by step, relative to the time of other ranks.

    Attributes:
        ranks: The ranks, ascending.
        steps: The steps, ascending; one that is null if no step is annotated.
        excess: Time of each rank (row) in each step (column), relative to `reference_ns`; NaN if unknown.
        reference_ns: The time that each rank is compared with in each step, ns: in a fleet the median of all ranks (one
            row), else the median of the other ranks (a row per rank).
        outliers: Ranks that are slower in most steps, the slowest first.
        typical: The rank that is closest to its reference.
    """

    ranks: NDArray[np.int64]
    steps: list[int | None]
    excess: NDArray[np.float64]
    reference_ns: NDArray[np.float64]
    outliers: pl.DataFrame
    typical: int

    @property
    def is_fleet(self) -> bool:
        """True for so many ranks that outliers are searched for."""
        return len(self.ranks) >= MIN_FLEET

    @property
    def notable_ranks(self) -> list[int]:
        """The ranks whose timelines are to be drawn before others: the slowest outliers and a typical rank."""
        return [*self.outliers["rank"].head(DRAWN_OUTLIERS), self.typical]


def measure_fleet(times: pl.DataFrame, hosts: Mapping[int, str | None]) -> FleetMap | None:
    """Compare each rank's time outside communication with other ranks; None for too few ranks, or no times.

    Args:
        times: The answer to temporal-breakdown, ``rank`` first.
        hosts: The host of each rank.
    """
    by_step = times.filter(pl.col("step").is_not_null())
    rows = by_step if by_step.height else times
    count = rows["rank"].n_unique()
    if count < MIN_RANKS or (count < MIN_FLEET and by_step["step"].n_unique() < MIN_STEPS):
        return None
    own = (pl.col("span_ns") - pl.col("exposed_communication_ns")).cast(pl.Float64).alias("own")
    rows = rows.select("rank", "step", own).unique(("rank", "step"), keep="first", maintain_order=True)
    ranks, steps = rows["rank"].unique().sort(), rows["step"].unique().sort()
    matrix = np.full((len(ranks), len(steps)), np.nan)
    at_step = (
        np.zeros(rows.height, np.int64)
        if steps.null_count()
        else steps.search_sorted(rows["step"]).to_numpy()
    )
    matrix[ranks.search_sorted(rows["rank"]).to_numpy(), at_step] = rows["own"].to_numpy()
    reference = _compute_references(matrix)
    excess = matrix / np.where(reference > 0, reference, np.nan) - 1
    if np.isnan(excess).all():
        return None
    typical, outliers = _find_outliers(ranks.to_numpy(), excess, hosts)
    return FleetMap(ranks.to_numpy(), steps.to_list(), excess, reference, outliers, typical)


def _compute_references(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `FleetMap.reference_ns` of the times of ranks (rows) in steps (columns)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that no other rank has
        if len(times) >= MIN_FLEET:
            return np.nanmedian(times, axis=0, keepdims=True)
        others = (np.delete(times, row, axis=0) for row in range(len(times)))
        return np.array([np.nanmedian(part, axis=0) for part in others])


def _find_outliers(
    ranks: NDArray[np.int64], excess: NDArray[np.float64], hosts: Mapping[int, str | None]
) -> tuple[int, pl.DataFrame]:
    """Return the typical rank, and a table of slow outliers: rank, host, excess_pct, slow_steps.

    Ranks may have roles that take different times (stages of a pipeline, experts), so a rank is compared with the ranks
    of its kind: see `divide_by_time`. excess_pct is relative to their median.
    """
    with np.errstate(all="ignore"):
        known = ~np.isnan(excess).all(axis=1)
        usual = np.full(len(ranks), np.nan)
        usual[known] = np.nanmedian(excess[known], axis=1)
    center = np.nanmedian(usual) if len(ranks) >= MIN_FLEET else 0.0
    typical = int(ranks[np.nanargmin(np.abs(usual - center))])
    kind = divide_by_time(usual, [hosts.get(rank) for rank in ranks.tolist()])
    centers, limit = np.zeros_like(usual), np.zeros_like(usual)
    for number in np.unique(kind):
        members = usual[(kind == number) & known]
        median = np.median(members)
        centers[kind == number] = median
        spread = OUTLIER * _NORMAL * np.median(np.abs(members - median))
        limit[kind == number] = max(MIN_EXCESS, spread)
    rows = np.flatnonzero(np.nan_to_num(usual - centers) > limit)
    if len(ranks) < MIN_FLEET:
        rows = rows[:0]
    above = (1 + usual) / (1 + centers) - 1
    rows = rows[np.argsort(-above[rows], kind="stable")]
    outliers = pl.DataFrame(
        {
            "rank": ranks[rows],
            "host": [hosts.get(rank) for rank in ranks[rows].tolist()],
            "excess_pct": 100 * above[rows],
            "slow_steps": (np.nan_to_num(excess[rows] - centers[rows, None]) > limit[rows, None]).sum(axis=1),
        },
        schema={"rank": pl.Int64, "host": pl.String, "excess_pct": pl.Float64, "slow_steps": pl.Int64},
    )
    return typical, outliers


def render_fleet_map(fleet: FleetMap, hosts: Mapping[int, str | None], drawn: Sequence[int]) -> str:
    """Render the heat map of ranks and steps, its data and the table of outliers as HTML.

    Args:
        fleet: The comparison of the ranks.
        hosts: The host of each rank.
        drawn: The ranks whose timelines are in the page.
    """
    outliers = fleet.outliers
    if outliers.height:
        listed = ", ".join(map(str, outliers["rank"].head(MAX_OUTLIERS).sort()))
        verb = "takes" if outliers.height == 1 else "take"
        summary = (
            f"{count_noun(outliers.height, 'rank')} {verb} longer than others of the same kind: {listed}"
        )
        summary += ", ..." if outliers.height > MAX_OUTLIERS else ""
    else:
        summary = "No rank takes notably longer than the others." if fleet.is_fleet else ""
    table = render_table(outliers, "outliers", "Outliers", "", limit=MAX_OUTLIERS) if outliers.height else ""
    content = _encode(fleet, hosts, drawn)
    data = base64.b64encode(json.dumps(content).encode()).decode()
    return fill_template(
        read_asset("fleet.html"),
        summary=f"<p>{escape(summary)}</p>" if summary else "",
        compared=_describe_reference(fleet),
        top=f"{content['top']:.1f} %",
        size="" if fleet.is_fleet else " few",
        drawn=escape(format_ranges(sorted(drawn))),
        table=table,
        data=data,
    )


def _encode(fleet: FleetMap, hosts: Mapping[int, str | None], drawn: Sequence[int]) -> dict[str, object]:
    """Return the heat map as data for JSON; ranks and steps are merged into at most MAX_ROWS * MAX_COLUMNS cells."""
    row_starts = _divide(len(fleet.ranks), MAX_ROWS)
    column_starts = _divide(len(fleet.steps), MAX_COLUMNS)
    rows, columns = len(row_starts) - 1, len(column_starts) - 1
    cells, slowest = np.full((rows, columns), np.nan), np.zeros((rows, columns), np.int64)
    for column in range(columns):
        part = fleet.excess[:, column_starts[column] : column_starts[column + 1]]
        counts = (~np.isnan(part)).sum(axis=1)
        mean = np.where(counts > 0, np.nansum(part, axis=1) / np.maximum(counts, 1), -np.inf)
        for row in range(rows):
            start = row_starts[row]
            slowest[row, column] = start + int(np.argmax(mean[start : row_starts[row + 1]]))
        values = mean[slowest[:, column]]
        cells[:, column] = np.where(np.isinf(values), np.nan, values)
    top = max(float(np.nanmax(cells)), MIN_EXCESS)
    levels = np.clip(np.round(np.nan_to_num(cells) / top * _LEVELS), 0, _LEVELS)
    levels[np.isnan(cells)] = _NO_DATA
    ranks, steps = fleet.ranks.tolist(), fleet.steps
    return {
        "rows": [[ranks[start], ranks[end - 1]] for start, end in itertools.pairwise(row_starts)],
        "columns": [[steps[start], steps[end - 1]] for start, end in itertools.pairwise(column_starts)],
        "compared": _describe_reference(fleet),
        "is_fleet": fleet.is_fleet,
        "references": [
            [_describe_time(row[start:end]) for start, end in itertools.pairwise(column_starts)]
            for row in fleet.reference_ns
        ],
        "top": 100 * top,
        "cells": base64.b64encode(levels.astype(np.uint8).tobytes()).decode(),
        "slowest": base64.b64encode(fleet.ranks[slowest].astype("<u4").tobytes()).decode(),
        "hosts": {rank: hosts.get(rank) for rank in sorted({*fleet.notable_ranks, *drawn})},
        "typical": fleet.typical,
        "drawn": list(drawn),
    }


def _describe_reference(fleet: FleetMap) -> str:
    if fleet.is_fleet:
        return "the median of all ranks"
    return "the other rank" if len(fleet.ranks) == 2 else "the median of the other ranks"


def _describe_time(times: NDArray[np.float64]) -> str:
    """Format the median of times, ns; "unknown" if none is known."""
    return "unknown" if np.isnan(times).all() else format_duration(float(np.nanmedian(times)))


def _divide(count: int, parts: int) -> list[int]:
    """Divide ``count`` rows or columns into at most ``parts`` ranges of equal size; return the range bounds."""
    size = -(-count // parts)
    return [*range(0, count, size), count]
