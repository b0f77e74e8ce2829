"""Many small collectives in a row, each of which pays the latency of one."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.collectives import parts
from etloom.patterns._finding import Finding, cost
from etloom.patterns._view import View

SMALL_BYTES = 1 << 20
MANY = 8

SCOPE = "rank"


def find(view: View) -> Iterator[Finding]:
    found = view.trace.once(parts, view.trace.rank or 0).filter(pl.col("collective") != "message")
    ordered = found.sort("start").with_columns(
        small=pl.col("bytes") < SMALL_BYTES,
        run=pl.struct("collective", "pg_name", pl.col("bytes") < SMALL_BYTES).rle_id(),
    )
    # One call in place of each run would still take the time of one.
    share = 1 - 1 / pl.len().over("run")
    many = ordered.filter("small").filter(pl.len().over("run") >= MANY)
    many = many.with_columns(cost_ns=(pl.col("end") - pl.col("start")) * share).with_columns(
        of_run=pl.col("cost_ns").sum().over("run")
    )
    costliest = many.sort("of_run", "run", "start", descending=(True, False, False), maintain_order=True)
    for (collective, group), own in costliest.group_by("collective", "pg_name", maintain_order=True):
        cost_ns, in_steps_ns = cost(view, own)
        size = own.select(pl.median("bytes") / 1024).item()
        yield Finding(
            f"{own.height:,} {collective} of {size:,.0f} KiB each, one after the other",
            cost_ns,
            "medium",
            "put them into one: a bucket (bucket_cap_mb), a flattened tensor, or a coalescing manager",
            own.height,
            step=view.step_at(own["start"][0]),
            name=str(collective),
            event=own["issuer"][0],
            in_steps_ns=in_steps_ns,
            place=f"{collective} {group}",
        )
