"""Find sequences of many small collectives, each of which pays the latency of a whole collective.

Eight or more consecutive collectives of less than 1 MiB in a step, with little or no other work in between.
Also on runs without a GPU.

Cost: the exposed time of each such sequence except one collective.
Confidence: medium.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import BOTH, DEVICE, Finding
from etloom.analyses.findings.rank_view import RankView
from etloom.collectives import list_participations
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.intervals import Intervals, union

SMALL_BYTES = 1 << 20
MIN_RUN_LENGTH = 8

MAX_INTERRUPTION = 0.25
"""Other work between two collectives that takes less than this share of the first does not separate them, for example
dividing a sum by the number of ranks.
"""
MIN_OVERLAP = 0.2
"""Work that overlaps communication for this share of its time runs concurrently, not between collectives."""

SCOPE = "rank"
NEEDS_OTHER_RANKS = True


def find(view: RankView) -> Iterator[Finding]:
    yield from view.compute_once(list_findings)


def list_findings(view: RankView) -> list[Finding]:
    """Return the findings of small collectives; `exposed_communication` subtracts their times from its cost."""
    return list(_find_runs(view))


def list_long_runs(view: RankView) -> pl.DataFrame:
    """Return the small collectives that follow each other in long sequences, with the number (``run``) of theirs."""
    participations = view.trace.compute_once(list_participations, view.trace.rank or 0)
    participations = participations.filter(pl.col("collective") != "message").drop_nulls(("start", "end"))
    ordered = (
        _with_steps(view, participations).sort("start").with_columns(small=pl.col("bytes") < SMALL_BYTES)
    )
    ordered = ordered.with_columns(
        run=pl.struct("collective", "pg_name", "small", "step").rle_id()
        + _is_separated(view, ordered).cum_sum()
    )
    return ordered.filter("small").filter(pl.len().over("run") >= MIN_RUN_LENGTH)


RANK_TABLES = (list_long_runs,)


def _find_runs(view: RankView) -> Iterator[Finding]:
    long_runs = view.compute_once(list_long_runs)
    if long_runs.is_empty():
        return
    # One combined call would still take the time of one; only what nothing hides is lost.
    share = 1 - 1 / pl.len().over("run")
    communication = view.activity.times["communication"]
    exposed = communication - view.activity.times["computation"] - view.waiting_for_ranks
    alone = pl.Series(exposed.covered(long_runs["start"], long_runs["end"]))
    long_runs = long_runs.with_columns(cost_ns=alone * share).with_columns(
        of_run=pl.col("cost_ns").sum().over("run")
    )
    costliest = long_runs.sort("of_run", "run", "start", descending=(True, False, False), maintain_order=True)
    for (collective, group), rows in costliest.group_by("collective", "pg_name", maintain_order=True):
        lost = Intervals.of(rows["start"], rows["end"]) & exposed
        cost_ns = min(round(float(rows["cost_ns"].sum())), lost.total)
        if not cost_ns:
            continue
        axis = next(iter(rows["axis"].drop_nulls().cast(pl.String).to_list()), None)
        costliest_run = rows.filter(pl.col("run") == rows["run"][0])
        yield Finding(
            f"{rows.height:,} consecutive {collective} of {_format_bytes(rows['bytes'].median())} each"
            + (f" in groups of {axis}" if axis else ""),
            cost_ns,
            "medium",
            "combine them: use a bucket (bucket_cap_mb), a flattened tensor, or a coalescing manager",
            lost,
            DEVICE if view.activity.basis == "device" else BOTH,
            rows.height,
            step=rows["step"][0],
            name=str(collective),
            event=rows["issuer"][0],
            start_ns=int(costliest_run["start"].min()),  # type: ignore[arg-type]
            end_ns=int(costliest_run["end"].max()),  # type: ignore[arg-type]
            in_steps_ns=round(cost_ns * (lost & view.step_intervals).total / lost.total),
            kind=f"{collective} {group}",
        )


def _format_bytes(size: Any) -> str:
    """Format a size below `SMALL_BYTES`: "4 bytes", "12 KiB"."""
    return f"{size / 1024:,.0f} KiB" if size >= 1024 else f"{size:,.0f} bytes"


def _with_steps(view: RankView, participations: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``step`` to participations: the step of the GPU activity's launch, else that of the recorded
    event."""
    events = view.trace.events
    event_steps = take_rows(events["step"], rows_of_ids(events, participations["event"]))
    launch_steps = take_rows(view.activities["step"], rows_of_ids(view.activities, participations["event"]))
    return participations.with_columns(step=pl.Series(launch_steps).fill_null(event_steps))


def _is_separated(view: RankView, participations: pl.DataFrame) -> pl.Series:
    """Return a mask of the communications before which enough other work ran, without overlap, since the previous ones
    ended."""
    times = view.activity.times
    communication = times["communication"]
    other = union(intervals for kind, intervals in times.items() if kind != "communication")
    alone = communication.covered(other.starts, other.ends) < MIN_OVERLAP * (other.ends - other.starts)
    other = Intervals.of(other.starts[alone], other.ends[alone])
    starts, ends = participations["start"].to_numpy(), np.maximum.accumulate(participations["end"].to_numpy())
    between = other.covered(ends[:-1], np.maximum(ends[:-1], starts[1:]))
    durations = (participations["end"] - participations["start"]).to_numpy()[:-1]
    return pl.Series(
        np.concatenate((np.zeros(min(1, len(starts)), bool), between > MAX_INTERRUPTION * durations))
    )
