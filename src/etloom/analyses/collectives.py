"""Communications across ranks: arrival order, waits and bandwidth; one row per communication.

A communication is matched across ranks by process group and sequence number, else by order and time (how: seq, order);
how is null if no other rank recorded it, or if the clocks cannot be compared. Times of the ranks are first converted to
one clock: see clocks.

- start_ns: arrival of the first rank (first_rank). start_spread_ns: from there until the last one (last_rank) arrives.
  wait_ns: the longest time a rank waited for the ranks it depends on; mean_wait_ns: the mean wait of the ranks. See
  arrivals for the wait of each rank. clock_error_ns: possible difference between the clocks of two of the ranks; a
  shorter wait is not significant.
- transfer_ns: the shortest time that a rank spent in it. The last rank to arrive waits for nobody, so this is the time
  of the data transfer itself; if fewer ranks were recorded than took part (recorded, group_size), it may include a wait
  for one of the others, and wait_ns is a lower bound. In collectives with a root, and in messages, a rank that only
  sends may leave before others arrive: there it is the shortest time that a receiver spent after all its senders had
  arrived. Null if only one rank recorded it: duration_ns, which includes any wait, is then all that is known.
- end_spread_ns: time between the first and the last departure.
- bytes: message size as nccl-tests counts it: the full output of an all-gather, the full input of a reduce-scatter,
  else the input of one rank. algo_gb_per_s is bytes / transfer_ns; bus_gb_per_s is that times 2(n-1)/n (all-reduce),
  (n-1)/n (all-gather, reduce-scatter, all-to-all, gather, scatter), 1 (others); for an uneven all-to-all it is the
  bytes sent or received by the busiest recorded rank / transfer_ns, and null if the splits are not recorded.

Units: ns, B, GB/s with GB = 1e9 B. Definition of bandwidths: nccl-tests (PERFORMANCE.md); of wait and transfer:
TraceLens' NcclAnalyser, on one clock.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.matched_communication import match_communications
from etloom.collectives import get_bus_factor
from etloom.core.trace import Job

SCOPE = "job"
COLUMNS = {
    "start_ns": pl.Int64,
    "collective": pl.String,
    "group": pl.String,
    "axis": pl.String,
    "seq": pl.Int64,
    "source": pl.Int64,
    "destination": pl.Int64,
    "how": pl.String,
    "recorded": pl.Int64,
    "group_size": pl.Int64,
    "bytes": pl.Int64,
    "duration_ns": pl.Int64,
    "start_spread_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "mean_wait_ns": pl.Float64,
    "first_rank": pl.Int64,
    "last_rank": pl.Int64,
    "clock_error_ns": pl.Int64,
    "transfer_ns": pl.Int64,
    "end_spread_ns": pl.Int64,
    "algo_gb_per_s": pl.Float64,
    "bus_gb_per_s": pl.Float64,
}


def analyze(job: Job) -> pl.DataFrame:
    return conform_columns(summarize_instances(match_communications(job).comparable), COLUMNS)


def remarks(table: pl.DataFrame) -> Iterator[str]:
    """Yield notes for the terminal on unmatched communications, uncertain waits and unknown bandwidths."""
    unmatched = table.filter(pl.col("how").is_null())
    if unmatched.height:
        size = unmatched["group_size"].max()
        yield (
            f"{unmatched.height:,} of {table.height:,} communications {explain_unmatched(size)}"  # type: ignore[arg-type]
        )
    uncertain = table.filter(pl.col("wait_ns").is_between(1, pl.col("clock_error_ns"), closed="left"))
    if uncertain.height:
        yield (
            f"{uncertain.height:,} of {table.height:,} waits are shorter than the clock uncertainty of the ranks "
            "(clock_error_ns): they are not significant"
        )

    uneven = table.filter(
        pl.col("bus_gb_per_s").is_null() & pl.col("algo_gb_per_s").is_not_null(), collective="all_to_all"
    )
    if uneven.height:
        yield (
            f"{uneven.height:,} of {table.height:,} communications are uneven all-to-alls without recorded splits: "
            "their bus bandwidth is unknown"
        )


def explain_unmatched(group_size: int | None) -> str:
    """Return text that explains why unmatched communications have no wait and no transfer time."""
    members = f" of {group_size}" if group_size else ""
    return (
        f"were recorded by only one rank{members} or could not be matched: arrivals, waits, transfer time and "
        "bandwidth are unknown; duration_ns includes any wait"
    )


def number_instances(participations: pl.DataFrame) -> pl.DataFrame:
    """Complete the column ``instance`` (collective instance number) of participations: each unmatched one gets a new
    number."""
    unmatched = pl.int_range(pl.len()) + 1 + pl.col("instance").max().fill_null(0)
    return participations.with_columns(instance=pl.coalesce("instance", unmatched))


def summarize_instances(participations: pl.DataFrame) -> pl.DataFrame:
    """Return one row per communication, sorted by start, with the columns `COLUMNS` and the instance number.

    Args:
        participations: The comparable participations (see `match_communications`).
    """
    last = pl.col("start").max()
    shared = pl.len() > 1
    # A rank that only sends may leave before others arrive: its time is not a transfer time.
    last_sender = pl.col("start").filter("sends").max()
    transfer = pl.col("end") - pl.max_horizontal("start", last_sender)
    rows = (
        number_instances(participations)
        .group_by("instance")
        .agg(
            pl.col("start").min().alias("start_ns"),
            *(
                pl.col(name).drop_nulls().first()
                for name in (
                    "collective",
                    "group",
                    "axis",
                    "seq",
                    "source",
                    "destination",
                    "how",
                    "group_size",
                )
            ),
            pl.len().alias("recorded"),
            pl.col("bytes").max(),
            pl.col("moved").max(),
            (pl.col("uneven").any() | (pl.col("bytes").n_unique() > 1)).alias("uneven"),
            (pl.col("end") - pl.col("start")).min().alias("duration_ns"),
            pl.when(shared).then(last - pl.col("start").min()).alias("start_spread_ns"),
            pl.when(shared).then(pl.col("wait").max()).alias("wait_ns"),
            pl.when(shared).then(pl.col("wait").mean()).alias("mean_wait_ns"),
            pl.when(shared).then(pl.col("rank").get(pl.col("start").arg_min())).alias("first_rank"),
            pl.when(shared).then(pl.col("rank").get(pl.col("start").arg_max())).alias("last_rank"),
            pl.when(shared).then(pl.col("error").max()).alias("clock_error_ns"),
            pl.when(shared & ~pl.all_horizontal(pl.col("sends", "receives").all()))
            .then(transfer.filter("receives").min())
            .when(shared)
            .then((pl.col("end") - pl.col("start")).min())
            .alias("transfer_ns"),
            pl.when(shared).then(pl.col("end").max() - pl.col("end").min()).alias("end_spread_ns"),
        )
        .with_columns(group_size=pl.coalesce("group_size", _pair_or_recorded()))
    )
    return _add_bandwidth(rows).sort("start_ns", "instance")


def _add_bandwidth(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the columns factor (`get_bus_factor`), algo_gb_per_s and bus_gb_per_s (bandwidths, GB/s) to
    communications."""
    factor = pl.struct("collective", "group_size").map_elements(
        lambda row: get_bus_factor(row["collective"], row["group_size"]), pl.Float64
    )
    positive_transfer = pl.when(pl.col("transfer_ns") > 0).then("transfer_ns")
    is_even = (pl.col("collective") != "all_to_all") | ~pl.col("uneven")
    moved = pl.coalesce("moved", pl.when(is_even).then(pl.col("bytes") * pl.col("factor")))
    return rows.with_columns(factor=factor).with_columns(
        algo_gb_per_s=pl.col("bytes") / positive_transfer, bus_gb_per_s=moved / positive_transfer
    )


def _pair_or_recorded() -> pl.Expr:
    """Return an expression for the smallest possible group size of a communication: 2 for a message, else the recorded
    ranks."""
    return pl.when(pl.col("collective") == "message").then(2).when(pl.col("recorded") > 1).then("recorded")
