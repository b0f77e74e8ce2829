"""Arrival, wait and departure of each rank at each communication; one row per communication and rank.

- communication: row number in the table of `collectives` (from 0), which summarizes the communications listed here.
- start_ns: arrival of the rank, on the common clock (see clocks). arrival_ns: delay after the first rank that arrived.
- wait_ns: how long the rank was then blocked until the ranks it depends on had arrived, at most until it left.
  Receivers wait for the senders. A rank that only sends (the root of a broadcast, the source of a message) waits for
  the receivers, if they arrived before it left.
- departure_ns: delay after the first rank that left. arrival_ns, wait_ns and departure_ns are null if no other rank
  recorded the communication.
- duration_ns: from arrival to departure, wait included.
- axis: axis of parallelism of the group (dp, tp, pp, cp, ep), where it is known.
- event: the host operator that issued it, on this rank.

Units: ns, B.
"""

from __future__ import annotations

import polars as pl

from etloom.analyses.collectives import number_instances, summarize_instances
from etloom.analyses.helpers import conform_columns
from etloom.analyses.helpers.matched_communication import match_communications
from etloom.core.trace import Job

SCOPE = "job"
COLUMNS = {
    "communication": pl.Int64,
    "collective": pl.String,
    "group": pl.String,
    "axis": pl.String,
    "seq": pl.Int64,
    "rank": pl.Int64,
    "start_ns": pl.Int64,
    "arrival_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "departure_ns": pl.Int64,
    "bytes": pl.Int64,
    "event": pl.Int64,
}


def analyze(job: Job) -> pl.DataFrame:
    participations = match_communications(job).comparable
    order = (
        summarize_instances(participations)
        .with_row_index("communication")
        .select("communication", "instance", "recorded")
    )
    rows = number_instances(participations).join(order, on="instance")
    shared = pl.col("recorded") > 1
    start, end = pl.col("start"), pl.col("end")
    table = rows.with_columns(
        start_ns=start,
        arrival_ns=pl.when(shared).then(start - start.min().over("instance")),
        wait_ns=pl.when(shared).then("wait"),
        duration_ns=end - start,
        departure_ns=pl.when(shared).then(end - end.min().over("instance")),
        event="issuer",
    )
    return conform_columns(table.sort("communication", "start", "rank"), COLUMNS)
