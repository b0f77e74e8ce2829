"""What the rank that comes last to a communication did meanwhile, compared with the last but one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from etloom.core.trace import Trace
from etloom.timeline.activity import compute_activity

CAUSES = ("longer_compute_ns", "other_work_ns", "late_launch_ns", "inherited_delay_ns")
"""Parts of a delay, which they sum to: see the analysis stragglers."""


def compute_delays(parts: pl.DataFrame, job: Mapping[int, Trace]) -> pl.DataFrame:
    """A row a meeting that one rank came to last: meeting, rank, start and own_start (of it, on the common clock and
    its own), issuer (the host operator), collective, error (see `Together.comparable`), delay_ns, CAUSES.

    The last is the last of whom another stood waiting, where one did, else the last to come, which delays nobody. Of
    several that come at the same moment none is.

    parts: of `Together.comparable`, those that met.
    """
    if parts.is_empty():
        schema = {
            "meeting": pl.Int64,
            "rank": pl.Int64,
            "start": pl.Int64,
            "own_start": pl.Int64,
            "issuer": pl.UInt32,
            "collective": pl.String,
            "error": pl.Int64,
            "delay_ns": pl.Int64,
            **dict.fromkeys(CAUSES, pl.Int64),
        }
        return pl.DataFrame(schema=schema)
    return _compare_last_ranks(_add_work_since_previous(parts, job))


def largest_cause(*others: str) -> pl.Expr:
    """The largest part, in words, of delay_ns; null for a rank to which none is put down. others: more columns that may
    be it."""
    names = (*CAUSES, *others)
    words = {at: name.removesuffix("_ns").replace("_", " ") for at, name in enumerate(names)}
    delays = pl.when(pl.col("delay_ns") > 0).then(pl.col(*CAUSES)).otherwise(0)
    parts = pl.concat_list(delays, pl.col(*others).fill_null(0)) if others else pl.concat_list(delays)
    named = parts.list.arg_max().replace_strict(words, return_dtype=pl.String)
    return pl.when(parts.list.max() > 0).then(named)


def _compare_last_ranks(parts: pl.DataFrame) -> pl.DataFrame:
    """The answer of `delays`, of parts with `_since`."""
    start, awaited = pl.col("start"), pl.col("awaited")
    # As far as clocks say that all had left before it came, nobody waited so long.
    stood = (start + pl.col("wait")).filter(awaited.is_not_null()).max()
    parts = parts.with_columns(
        last=pl.coalesce(awaited.max(), start.max()).over("meeting"), stood=stood.over("meeting")
    )
    late = parts.filter(start == pl.col("last")).filter(pl.len().over("meeting") == 1)
    before = parts.filter(start < pl.col("last")).sort("meeting", "start", "rank")
    two = late.sort("meeting").join(
        before.group_by("meeting").agg(pl.col("start", "left", "compute", "busy").last()),
        on="meeting",
        suffix="_other",
        maintain_order="left",
    )

    def more(name: str) -> pl.Expr:
        return pl.col(name) - pl.col(f"{name}_other")

    is_measured = pl.col("left").is_not_null() & pl.col("left_other").is_not_null()
    delay = pl.min_horizontal("start", "stood") - pl.col("start_other")
    worked = (more("compute"), more("busy") - more("compute"), delay - more("left") - more("busy"))
    causes = (
        *(pl.when(is_measured).then(part).otherwise(0) for part in worked),
        pl.when(is_measured).then(more("left")).otherwise(delay),
    )
    is_delayed = pl.col("stood") > pl.col("start_other")
    return two.select(
        "meeting",
        "rank",
        "start",
        "own_start",
        "issuer",
        "collective",
        "error",
        *(
            pl.when(is_delayed).then(part).otherwise(0).alias(name)
            for name, part in zip(("delay_ns", *CAUSES), (delay, *causes), strict=True)
        ),
    )


def _add_work_since_previous(parts: pl.DataFrame, job: Mapping[int, Trace]) -> pl.DataFrame:
    """The parts with what their rank did since it left the one before in the group: left, compute, busy."""
    before = pl.col("end", "own_end").shift(1).over("rank", "where", "group", order_by="start")
    ordered = parts.with_columns(before.name.prefix("before_"))
    # A part may begin before the last one ended, on another stream: then nothing lies between.
    ordered = ordered.with_columns(
        left=pl.min_horizontal("before_end", "start"),
        own_left=pl.min_horizontal("before_own_end", "own_start"),
    ).with_columns(pl.when(pl.col("before_end").is_not_null()).then("left").alias("left"))
    return pl.concat(
        _add_work(participations, job[rank])  # type: ignore[index]
        for (rank,), participations in ordered.group_by("rank", maintain_order=True)
    )


def _add_work(participations: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    work = compute_activity(trace)
    until = participations["own_start"].to_numpy()
    since = np.where(
        participations["left"].is_null().to_numpy(), until, participations["own_left"].to_numpy()
    )
    return participations.with_columns(
        pl.Series("compute", work.times["computation"].covered(since, until)),
        pl.Series("busy", work.busy.covered(since, until)),
    )
