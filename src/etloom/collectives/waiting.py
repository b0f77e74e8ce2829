"""Computes the waiting time of each rank in a collective instance, for all analyses.

A rank waits for those whose data it receives. A rank that only sends may wait for its receivers: gloo holds a sender
until the receiver is ready, NCCL releases a small message earlier. So a sender that departed before a receiver arrived
did not wait for it. A receiver cannot depart before the data was sent: if clocks contradict this, it waited until it
departed.
"""

from __future__ import annotations

import polars as pl

from etloom.collectives.matching import is_receiver, is_sender

COLUMNS = {
    "sends": pl.Boolean,  # others wait for this rank
    "receives": pl.Boolean,  # it waits for others
    "awaited": pl.Int64,  # arrival of the last rank it waited for; null if it waited for none
    "wait": pl.Int64,  # from its own start until then, at most until its own end; null if unmatched
}


def add_waits(parts: pl.DataFrame) -> pl.DataFrame:
    """Add the waiting time of each rank in its collective instance (`COLUMNS`, ns) to matched participations.

    ``parts``: rank, instance, start, end and the columns of `get_roles`.
    """
    table = parts.with_columns(sends=is_sender(), receives=is_receiver()).with_row_index("part")
    last_arrival = pl.col("start").filter("sends").max().over("instance")
    until = pl.when("receives").then(last_arrival).otherwise(_last_receiver_arrivals(table))
    is_matched = pl.col("instance").is_not_null()
    table = table.with_columns(awaited=pl.when(is_matched & (until > pl.col("start"))).then(until)).drop(
        "part"
    )
    wait = (pl.min_horizontal("awaited", "end") - pl.col("start")).clip(0)
    return table.with_columns(
        wait=pl.when(is_matched).then(pl.when(pl.col("awaited").is_null()).then(0).otherwise(wait))
    )


def _last_receiver_arrivals(table: pl.DataFrame) -> pl.Series:
    """Return for each send-only rank the last arrival (ns) of a receiver before that rank left; null for others."""
    senders = table.filter(~pl.col("receives")).select("part", "instance", "end")
    receivers = table.filter("receives").select("instance", arrival="start")
    last = senders.join(receivers, on="instance").filter(pl.col("arrival") <= pl.col("end"))
    arrivals = last.group_by("part").agg(pl.col("arrival").max())
    return table.select("part").join(arrivals, on="part", how="left", maintain_order="left")["arrival"]
