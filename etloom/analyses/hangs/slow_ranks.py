"""Slow ranks of a job that makes progress: one rank arrives last in nearly every collective."""

from __future__ import annotations

import polars as pl

from etloom.analyses.hangs.causes import EVIDENCE_COLUMNS, HangCause
from etloom.analyses.hangs.job_calls import JobCalls

_MIN_CALLS = 10
_MIN_LAST_SHARE = 0.9
_MIN_PERIOD_SHARE = 0.3
_MIN_LATENESS_NS = 10_000_000


def measure_lateness(calls: JobCalls) -> pl.DataFrame:
    """Return how much later the last rank called each collective than the second last rank, ns.

    Clocks of hosts are compared as they are.

    Returns:
        A row per collective that all ranks with a dump called: group, seq, called_ns (last call), rank (the last one),
        lateness_ns.
    """
    called = (
        calls.table.filter(~pl.col("is_p2p"))
        .group_by("group", "seq")
        .agg(
            callers=pl.col("rank").n_unique(),
            called_ns=pl.col("created_ns").max(),
            rank=pl.col("rank").sort_by("created_ns").last(),
            lateness_ns=pl.col("created_ns").max() - pl.col("created_ns").sort().slice(-2, 1).first(),
        )
    )
    return called.filter(pl.col("callers") == len(calls.dumped)).drop("callers").sort("called_ns")


def find_slow_rank(calls: JobCalls) -> HangCause | None:
    """Return the rank that arrives last in nearly all late collectives, as a cause; None if no rank does.

    A job with too few collectives has no slow rank.
    """
    lateness = measure_lateness(calls) if len(calls.dumped) > 1 else pl.DataFrame()
    if lateness.height < _MIN_CALLS:
        return None
    # Collectives that follow each other at once start together: only those after computation count.
    typical_ns = lateness["lateness_ns"].quantile(0.5)
    late = lateness.filter(pl.col("lateness_ns") >= max(_MIN_LATENESS_NS, typical_ns or 0))
    if late.height < _MIN_CALLS:
        return None
    (rank, last_count), *_rest = late["rank"].value_counts(sort=True).iter_rows()
    mine = late.filter(pl.col("rank") == rank)
    median_ns = int(mine["lateness_ns"].median() or 0)  # type: ignore[arg-type]
    times_ns = lateness["called_ns"].to_list()
    is_often_last = last_count >= _MIN_LAST_SHARE * late.height
    if not is_often_last or mine["lateness_ns"].sum() < _MIN_PERIOD_SHARE * (times_ns[-1] - times_ns[0]):
        return None
    text = (
        f"rank {rank} is slow: it arrived last in {last_count:,} of {late.height:,} late collectives, "
        f"{median_ns / 1e6:,.1f} ms after the others (median)"
    )
    evidence = pl.DataFrame([(rank, text)], schema=EVIDENCE_COLUMNS, orient="row")
    return HangCause("slow", (rank,), text, evidence)
