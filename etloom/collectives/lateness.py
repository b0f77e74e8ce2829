"""What the rank that comes last to a communication did meanwhile, compared with the last but one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from etloom.activity import activity
from etloom.trace import Trace

CAUSES = ("longer_compute_ns", "other_work_ns", "late_launch_ns", "before_ns")
"""Parts of a delay, which they sum to: see the analysis stragglers."""


def delays(parts: pl.DataFrame, job: Mapping[int, Trace]) -> pl.DataFrame:
    """A row a meeting: meeting, rank (the last to come), start and own_start (of it, on the common clock and its own),
    issuer (the host operator), collective, error (see `Together.comparable`), delay_ns, CAUSES.

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
    return _late(_since(parts, job))


def cause(*others: str) -> pl.Expr:
    """The largest part, in words, of delay_ns; null for a rank to which none is put down. others: more columns that may
    be it."""
    names = (*CAUSES, *others)
    words = {at: name.removesuffix("_ns").replace("_", " ") for at, name in enumerate(names)}
    delays = pl.when(pl.col("delay_ns") > 0).then(pl.col(*CAUSES)).otherwise(0)
    parts = pl.concat_list(delays, pl.col(*others).fill_null(0)) if others else pl.concat_list(delays)
    named = parts.list.arg_max().replace_strict(words, return_dtype=pl.String)
    return pl.when(parts.list.max() > 0).then(named)


def _late(parts: pl.DataFrame) -> pl.DataFrame:
    """meeting, rank, start, delay_ns and its causes, of the last to come to each meeting; of parts with `_since`."""
    ordered = parts.sort("meeting", "start", "rank")
    done = ("start", "left", "compute", "busy")
    two = ordered.group_by("meeting", maintain_order=True).agg(
        pl.col("rank", "own_start", "issuer", "collective", "error").last(),
        *(pl.col(name).last() for name in done),
        *(pl.col(name).get(-2).alias(f"{name}_other") for name in done),
    )

    def more(name: str) -> pl.Expr:
        return pl.col(name) - pl.col(f"{name}_other")

    known = pl.col("left").is_not_null() & pl.col("left_other").is_not_null()
    worked = (more("compute"), more("busy") - more("compute"), more("start") - more("left") - more("busy"))
    return two.select(
        "meeting",
        "rank",
        "start",
        "own_start",
        "issuer",
        "collective",
        "error",
        more("start").alias("delay_ns"),
        *(
            pl.when(known).then(part).otherwise(0).alias(name)
            for name, part in zip(CAUSES, worked, strict=False)
        ),
        pl.when(known).then(more("left")).otherwise(more("start")).alias("before_ns"),
    )


def _since(parts: pl.DataFrame, job: Mapping[int, Trace]) -> pl.DataFrame:
    """The parts with what their rank did since it left the one before in the group: left, compute, busy."""
    before = pl.col("end", "own_end").shift(1).over("rank", "where", "group", order_by="start")
    ordered = parts.with_columns(before.name.prefix("before_"))
    # A part may begin before the last one ended, on another stream: then nothing lies between.
    ordered = ordered.with_columns(
        left=pl.min_horizontal("before_end", "start"),
        own_left=pl.min_horizontal("before_own_end", "own_start"),
    ).with_columns(pl.when(pl.col("before_end").is_not_null()).then("left").alias("left"))
    return pl.concat(
        _with_work(own, job[rank])  # type: ignore[index]
        for (rank,), own in ordered.group_by("rank", maintain_order=True)
    )


def _with_work(own: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    work = activity(trace)
    until = own["own_start"].to_numpy()
    since = np.where(own["left"].is_null().to_numpy(), until, own["own_left"].to_numpy())
    return own.with_columns(
        pl.Series("compute", work.times["computation"].covered(since, until)),
        pl.Series("busy", work.busy.covered(since, until)),
    )
