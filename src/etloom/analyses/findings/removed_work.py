"""Findings of a part of the program that would not run: its time on the host, and what it launches on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import DEVICE, HOST, Finding, sum_findings, sum_places
from etloom.analyses.findings.gaps import list_stalls
from etloom.analyses.findings.rank_view import RankView
from etloom.core.intervals import EMPTY, Intervals, union

MAX_LEAD_NS = 3_000
"""A device needs a few us between two kernels: such a pause goes with the kernel after it."""
_OTHER_STALLS = ("data", "save", "compile", "profiler", "pause", "call")
"""Stalls of the host, by cause in `gaps.list_stalls`, that do not go away with a part of the program around them."""
REGION_SCHEMA = dict.fromkeys(("start", "end", "event", "step", "cost_ns"), pl.Int64) | {"name": pl.String}


def list_launched(view: RankView, regions: pl.DataFrame) -> pl.DataFrame:
    """Return the GPU activities that were launched by the thread of a region inside of it, as rows for `sum_places`.

    Args:
        view: The rank.
        regions: start and end (ns) of times that are disjoint on a thread, ascending; event (id), of that thread.

    Returns:
        region (row of ``regions``), cat, step, stream, name, start (with the pause since the kernel before), end,
        dur, event (the launch call), cost_ns (end - start).
    """
    launched = view.activities["launch_ts"].is_not_null()
    work = view.activities.filter(launched & (not regions.is_empty()))
    callers, called = view.threads[view.find_rows(work["launch"])], work["launch_ts"].to_numpy()
    owners = view.threads[view.find_rows(regions["event"])]
    starts, ends = regions["start"].to_numpy(), regions["end"].to_numpy()
    region = np.full(work.height, -1)
    for thread in np.unique(owners):
        region_rows, calls = np.flatnonzero(owners == thread), np.flatnonzero(callers == thread)
        at = np.searchsorted(starts[region_rows], called[calls], side="right") - 1
        is_inside = (at >= 0) & (called[calls] < ends[region_rows][at])
        region[calls[is_inside]] = region_rows[at[is_inside]]
    inside = np.flatnonzero(region >= 0)
    rows = work[inside].with_columns(region=pl.Series(region[inside], dtype=pl.Int64))
    pause = (pl.col("ts") - pl.col("end").shift(1)).over("device", "stream", "region").fill_null(0)
    lead = pl.when(pause.is_between(0, MAX_LEAD_NS)).then(pause).otherwise(0)
    return rows.with_columns(start=pl.col("ts") - lead).select(
        *("region", "cat", "step", "stream", "name", "start", "end", "dur"),
        event="launch",
        cost_ns=pl.col("end") - pl.col("start"),
    )


def keep_disjoint(regions: pl.DataFrame) -> pl.DataFrame:
    """Return regions by start, without those that begin before the one kept last has ended."""
    regions = regions.sort("start")
    rows, end = [], None
    for row, (start, region_end) in enumerate(regions.select("start", "end").iter_rows()):
        if end is None or start >= end:
            rows.append(row)
            end = region_end
    return regions[rows]


def sum_removed(
    view: RankView, regions: pl.DataFrame, title: str, launched: pl.DataFrame | None = None, **facts: Any
) -> Iterator[Finding]:
    """Yield a single finding on regions of the host without which their work on host and device would not run.

    Its cost on the rank does not count time in which the device is busy with other work; the simulated gain decides
    for itself what that time hides. A stall of the host inside a region, such as a garbage collection, would remain.

    Args:
        view: The rank.
        regions: start, end, event, step, name and cost_ns (the host's time that would be saved).
        title: The problem.
        launched: Rows of `list_launched` with the device's time that would be saved; by default all of it.
        **facts: confidence and advice, as for `sum_places`.
    """
    if launched is None:
        launched = list_launched(view, regions)
    stalls = _select_inner(view, regions)
    stalled = stalls.covered(regions["start"], regions["end"])
    host = regions.with_columns(cost_ns=(pl.col("cost_ns") - stalled).clip(0))
    parts = [
        *sum_places(view, host, lambda _: title, tracks=HOST, by="name", hidden=stalls, **facts),
        *sum_places(view, launched, lambda _: title, tracks=DEVICE, by="name", **facts),
    ]
    if not parts:
        return
    finding = sum_findings(parts, title, by="name")
    other = view.activities.filter(~pl.col("launch").is_in(launched["event"].implode()).fill_null(False))
    exposed = finding.lost - Intervals.of(other["ts"], other["end"])
    yield replace(
        finding,
        cost_ns=min(finding.cost_ns, exposed.total),
        in_steps_ns=min(finding.in_steps_ns, (exposed & view.step_intervals).total),
        components=tuple(parts),
    )


def _select_inner(view: RankView, regions: pl.DataFrame) -> Intervals:
    """Return the stalls that lie in a region: those around one, or next to it, may be of another thread."""
    if regions.is_empty():
        return EMPTY
    stalls = dict(view.compute_once(list_stalls))
    inner = union(stalls[name] for name in _OTHER_STALLS)
    starts, ends = regions["start"].to_numpy(), np.maximum.accumulate(regions["end"].to_numpy())
    at = np.searchsorted(starts, inner.starts, side="right") - 1
    is_inner = (at >= 0) & (inner.ends <= ends[at])
    return Intervals.of(inner.starts[is_inner], inner.ends[is_inner])
