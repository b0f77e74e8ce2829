"""Which rank the others wait for, how long, and what it did instead: a row a rank.

The rank that comes last to a communication delays it by delay_ns: from the coming of the last but one to its own. What
the two did since each left the communication before in the same group is compared, which splits the delay without a
rest:

- longer_compute_ns: it computed longer.
- other_work_ns: it did other work longer: other groups' communication, copies.
- late_launch_ns: its device had nothing to do for longer, since the host came late with it. (Of gloo, on the host: it
  was in no operator for longer, which is Python, input data, or a thread kept waiting.)
- before_ns: it came later out of the communication before, or that was not recorded.

A part can be negative: the rank made up for some of the rest. cause names the largest.

- communications: that others took part in; last: those it came last to. waited_ns: what it waited for others itself.
- pct: delay_ns in percent of the time from the first communication to the end of the last; delays
  of communications that are under way at one time count each.

Units: ns, percent. Times of the ranks are put on one clock first, see clocks. A slow link shows in collectives, as
transfer_ns above that of others of the same size.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from etloom.analyses._activity import activity, answer
from etloom.analyses._together import compared
from etloom.trace import Job, Trace

SCOPE = "job"
_CAUSES = ("longer_compute_ns", "other_work_ns", "late_launch_ns", "before_ns")
COLUMNS = {
    "rank": pl.Int64,
    "communications": pl.Int64,
    "last": pl.Int64,
    "delay_ns": pl.Int64,
    "pct": pl.Float64,
    **dict.fromkeys(_CAUSES, pl.Int64),
    "cause": pl.String,
    "waited_ns": pl.Int64,
}


def analyze(job: Job) -> pl.DataFrame:
    parts = compared(job).parts.filter(pl.col("meeting").is_not_null())
    span = parts.select((pl.col("end").max() - pl.col("start").min()).cast(pl.Float64)).item()
    delays = late(_since(parts, job))
    sums = delays.group_by("rank").agg(pl.len().alias("last"), pl.col("delay_ns", *_CAUSES).sum())
    arrival = pl.col("start").max().over("meeting")
    table = (
        parts.group_by("rank", maintain_order=True)
        .agg(pl.len().alias("communications"))
        .join(
            parts.with_columns(waited=arrival - pl.col("start")).group_by("rank").agg(pl.col("waited").sum()),
            on="rank",
        )
        .join(sums, on="rank", how="left")
        .with_columns(pl.col("last", "delay_ns", *_CAUSES).fill_null(0), waited_ns="waited")
        .with_columns(pct=100 * pl.col("delay_ns") / span, cause=_cause())
        .sort("delay_ns", "rank", descending=(True, False))
    )
    return answer(table, COLUMNS)


def late(parts: pl.DataFrame) -> pl.DataFrame:
    """meeting, rank, delay_ns and its causes, of the last to come to each meeting; of parts with `_since`."""
    ordered = parts.sort("meeting", "start", "rank")
    done = ("start", "left", "compute", "busy")
    two = ordered.group_by("meeting", maintain_order=True).agg(
        pl.col("rank").last(),
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
        more("start").alias("delay_ns"),
        *(
            pl.when(known).then(part).otherwise(0).alias(name)
            for name, part in zip(_CAUSES, worked, strict=False)
        ),
        pl.when(known).then(more("left")).otherwise(more("start")).alias("before_ns"),
    )


def _since(parts: pl.DataFrame, job: Job) -> pl.DataFrame:
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


def _cause() -> pl.Expr:
    """The largest part, in words; null for a rank that delays nobody."""
    words = {name: name.removesuffix("_ns").replace("_", " ") for name in _CAUSES}
    largest = pl.concat_list(*_CAUSES).list.arg_max()
    named = largest.replace_strict(dict(enumerate(words.values())), return_dtype=pl.String)
    return pl.when(pl.col("delay_ns") > 0).then(named)
