"""Many small collectives in a row, each of which pays the latency of one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from etloom.analyses.findings.finding import Finding, compute_cost
from etloom.analyses.findings.rank_view import View
from etloom.collectives import list_participations
from etloom.core.arrays import rows_of_ids, take_rows
from etloom.core.intervals import Intervals, union

SMALL_BYTES = 1 << 20
MANY = 8

ASIDE = 0.25
"""Other work between two collectives that takes less than this share of the first does not part them: dividing a sum by
the number of ranks."""
BESIDE = 0.2
"""Work that runs beside communication for this share of its time goes on meanwhile."""

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    found = view.trace.compute_once(list_participations, view.trace.rank or 0).filter(
        pl.col("collective") != "message"
    )
    ordered = _with_steps(view, found).sort("start").with_columns(small=pl.col("bytes") < SMALL_BYTES)
    ordered = ordered.with_columns(
        run=pl.struct("collective", "pg_name", "small", "step").rle_id() + _parted(view, ordered).cum_sum()
    )
    # One call in place of each run would still take the time of one.
    share = 1 - 1 / pl.len().over("run")
    many = ordered.filter("small").filter(pl.len().over("run") >= MANY)
    many = many.with_columns(cost_ns=(pl.col("end") - pl.col("start")) * share).with_columns(
        of_run=pl.col("cost_ns").sum().over("run")
    )
    costliest = many.sort("of_run", "run", "start", descending=(True, False, False), maintain_order=True)
    for (collective, group), own in costliest.group_by("collective", "pg_name", maintain_order=True):
        cost_ns, in_steps_ns = compute_cost(view, own)
        size = own.select(pl.median("bytes") / 1024).item()
        yield Finding(
            f"{own.height:,} {collective} of {size:,.0f} KiB each, one after the other",
            cost_ns,
            "medium",
            "put them into one: a bucket (bucket_cap_mb), a flattened tensor, or a coalescing manager",
            own.height,
            step=own["step"][0],
            name=str(collective),
            event=own["issuer"][0],
            in_steps_ns=in_steps_ns,
            place=f"{collective} {group}",
        )


def _with_steps(view: View, parts: pl.DataFrame) -> pl.DataFrame:
    """parts with the step of each: that of its launch, of what no recorded call launched the one in which it starts."""
    events = view.trace.events
    own = take_rows(events["step"], rows_of_ids(events, parts["event"]))
    launched = take_rows(view.work["step"], rows_of_ids(view.work, parts["event"]))
    return parts.with_columns(step=pl.Series(launched).fill_null(own))


def _parted(view: View, parts: pl.DataFrame) -> pl.Series:
    """Whether other work, that does not run beside communication, comes between each part and what ended before it."""
    times = view.activity.times
    communication = times["communication"]
    other = union(one for kind, one in times.items() if kind != "communication")
    alone = communication.covered(other.starts, other.ends) < BESIDE * (other.ends - other.starts)
    other = Intervals.of(other.starts[alone], other.ends[alone])
    starts, ends = parts["start"].to_numpy(), np.maximum.accumulate(parts["end"].to_numpy())
    between = other.covered(ends[:-1], np.maximum(ends[:-1], starts[1:]))
    taking = (parts["end"] - parts["start"]).to_numpy()[:-1]
    return pl.Series(np.concatenate((np.zeros(min(1, len(starts)), bool), between > ASIDE * taking)))
