"""Causes of lateness: the work of the rank that arrived last, compared with the rank that arrived before
it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from etloom.core.arrays import group_rows, is_present, take_rows, to_array
from etloom.core.trace import Trace
from etloom.timeline.activity import compute_activity

CAUSES = ("longer_compute_ns", "other_work_ns", "late_launch_ns", "inherited_delay_ns")
"""Components of a delay, which add up to it: see the analysis stragglers."""


def compute_delays(parts: pl.DataFrame, job: Mapping[int, Trace]) -> pl.DataFrame:
    """Compute the delay that the last rank to arrive at each collective instance causes, and its components, ns.

    The last rank is the last one that another rank waited for, or, if none did, the last to arrive
    (which delays nobody).
    Ranks that arrive simultaneously do not count.

    Args:
        parts: The participations of `MatchedCollectives.comparable`. One that is unmatched, as if a rank did not record
            a step, delays nobody; what was done since then is not compared.
        job: The traces by rank.

    Returns:
        One row per instance with a last rank: instance, rank, start and own_start (on the common and the rank's clock),
        issuer (the host operator), collective, error (see `MatchedCollectives.comparable`), delay_ns, CAUSES.
    """
    if parts["instance"].is_null().all():
        schema = {
            "instance": pl.Int64,
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
    """Return an expression for the name of the largest component of delay_ns; null without a delay.

    ``others``: further columns to compare.
    """
    names = (*CAUSES, *others)
    words = {at: name.removesuffix("_ns").replace("_", " ") for at, name in enumerate(names)}
    words[CAUSES.index("inherited_delay_ns")] = "inherited or unknown"
    delays = pl.when(pl.col("delay_ns") > 0).then(pl.col(*CAUSES)).otherwise(0)
    parts = pl.concat_list(delays, pl.col(*others).fill_null(0)) if others else pl.concat_list(delays)
    named = parts.list.arg_max().replace_strict(words, return_dtype=pl.String)
    return pl.when(parts.list.max() > 0).then(named)


def _compare_last_ranks(parts: pl.DataFrame) -> pl.DataFrame:
    """Return the table of `compute_delays`: each instance's last rank to arrive, compared with the rank before it."""
    start, awaited = pl.col("start"), pl.col("awaited")
    # If the clocks show that all ranks had left before it arrived, nobody waited that long.
    stood = (start + pl.col("wait")).filter(awaited.is_not_null()).max()
    parts = parts.with_columns(
        last=pl.coalesce(awaited.max(), start.max()).over("instance"), stood=stood.over("instance")
    )
    late = parts.filter(start == pl.col("last")).filter(pl.len().over("instance") == 1)
    before = parts.filter(start < pl.col("last")).sort("instance", "start", "rank")
    last_two = late.sort("instance").join(
        before.group_by("instance").agg(pl.col("start", "left", "compute", "busy").last()),
        on="instance",
        suffix="_other",
        maintain_order="left",
    )

    def more(name: str) -> pl.Expr:
        return pl.col(name) - pl.col(f"{name}_other")

    has_previous = pl.col("left").is_not_null() & pl.col("left_other").is_not_null()
    delay = pl.min_horizontal("start", "stood") - pl.col("start_other")
    work_differences = (more("compute"), more("busy") - more("compute"), delay - more("left") - more("busy"))
    causes = (
        *(pl.when(has_previous).then(part).otherwise(0) for part in work_differences),
        pl.when(has_previous).then(more("left")).otherwise(delay),
    )
    delays_others = pl.col("stood") > pl.col("start_other")
    return last_two.select(
        "instance",
        "rank",
        "start",
        "own_start",
        "issuer",
        "collective",
        "error",
        *(
            pl.when(delays_others).then(part).otherwise(0).alias(name)
            for name, part in zip(("delay_ns", *CAUSES), (delay, *causes), strict=True)
        ),
    )


def _add_work_since_previous(parts: pl.DataFrame, job: Mapping[int, Trace]) -> pl.DataFrame:
    """Add when a rank left its group's previous instance (``left``), and its work since (``compute``, ``busy``; ns).

    left is null if there is no previous instance, or no other rank recorded it. Unmatched participations are dropped.
    """
    members = pl.coalesce(pl.col("ranks").str.replace_all(" ", "", literal=True), "group")
    before = pl.col("end", "own_end", "instance").shift(1).over("rank", "where", members, order_by="start")
    ordered = parts.with_columns(before.name.prefix("before_")).filter(pl.col("instance").is_not_null())
    # A participation may begin before the previous one ended, on another stream: then there is no time in between.
    ordered = ordered.with_columns(
        left=pl.min_horizontal("before_end", "start"),
        own_left=pl.min_horizontal("before_own_end", "own_start"),
    ).with_columns(pl.when(pl.col("before_instance").is_not_null()).then("left").alias("left"))
    return _add_work(ordered, job)


def _add_work(parts: pl.DataFrame, job: Mapping[int, Trace]) -> pl.DataFrame:
    """Add the columns ``compute`` and ``busy``: time (ns) that each rank computed, or was active, before its arrival.

    The result is grouped by rank.
    """
    groups = group_rows(parts["rank"].to_numpy())
    parts = take_rows(parts, np.concatenate(groups))
    ranks, untils = parts["rank"].to_numpy(), parts["own_start"].to_numpy()
    sinces = np.where(~is_present(parts["left"]), untils, to_array(parts["own_left"], 0))
    compute, busy = np.zeros(parts.height, np.int64), np.zeros(parts.height, np.int64)
    end = 0
    for size in map(len, groups):
        rows, end = slice(end, end + size), end + size
        work = compute_activity(job[int(ranks[rows.start])])
        compute[rows] = work.times["computation"].covered(sinces[rows], untils[rows])
        busy[rows] = work.busy.covered(sinces[rows], untils[rows])
    return parts.hstack([pl.Series("compute", compute), pl.Series("busy", busy)])
