"""When each rank came to what the ranks do together, what it waited there, and when it left: a row a rank's part.

- communication: which row of `collectives` it is a part of, from 0; that table sums up what this one lists.
- start_ns: when the rank came, on one clock (see clocks). arrival_ns: how long after the first rank. wait_ns: how long
  it then stood before those had come whom it waits for, at most until it left: who gets data waits for those who send
  it; who only sends (the root of a broadcast, the source of a message) for those who get it, as far as they came before
  it left. left_ns: how long after the first to leave. These are null where no other rank recorded it.
- duration_ns: from coming to leaving, the wait included.
- event: the host operator behind it, of the rank.

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
    "seq": pl.Int64,
    "rank": pl.Int64,
    "start_ns": pl.Int64,
    "arrival_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "left_ns": pl.Int64,
    "bytes": pl.Int64,
    "event": pl.Int64,
}


def analyze(job: Job) -> pl.DataFrame:
    found = match_communications(job).comparable
    order = (
        summarize_instances(found)
        .with_row_index("communication")
        .select("communication", "meeting", "recorded")
    )
    parts = number_instances(found).join(order, on="meeting")
    shared = pl.col("recorded") > 1
    start, end = pl.col("start"), pl.col("end")
    table = parts.with_columns(
        start_ns=start,
        arrival_ns=pl.when(shared).then(start - start.min().over("meeting")),
        wait_ns=pl.when(shared).then("wait"),
        duration_ns=end - start,
        left_ns=pl.when(shared).then(end - end.min().over("meeting")),
        event="issuer",
    )
    return conform_columns(table.sort("communication", "start", "rank"), COLUMNS)
