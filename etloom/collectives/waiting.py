"""What each rank waited in what ranks do together: the one definition, for whoever asks.

A rank waits for those whose data it gets; one that only sends waits, where it stands there so long, for those who get
its data: gloo keeps a sender until there is a place for the message, NCCL lets go of a small one before. So of a rank
that left before another came it is not said that it waited for that one. A rank that gets data cannot leave before
this was sent: where clocks say so, it waited until it left.
"""

from __future__ import annotations

import polars as pl

from etloom.collectives.matching import is_receiver, is_sender

COLUMNS = {
    "sends": pl.Boolean,  # others wait for this rank
    "receives": pl.Boolean,  # it waits for others
    "awaited": pl.Int64,  # when the last one came whom it stood waiting for; null where it waited for none
    "wait": pl.Int64,  # from its own start until then, at most until its own end; null where it met nobody
}


def add_waits(parts: pl.DataFrame) -> pl.DataFrame:
    """The parts of meetings (rank, meeting, start, end and what `roles` asks for) with COLUMNS, in ns."""
    table = parts.with_columns(sends=is_sender(), receives=is_receiver()).with_row_index("part")
    last_arrival = pl.col("start").filter("sends").max().over("meeting")
    until = pl.when("receives").then(last_arrival).otherwise(_last_receiver_arrivals(table))
    is_matched = pl.col("meeting").is_not_null()
    table = table.with_columns(awaited=pl.when(is_matched & (until > pl.col("start"))).then(until)).drop(
        "part"
    )
    wait = (pl.min_horizontal("awaited", "end") - pl.col("start")).clip(0)
    return table.with_columns(
        wait=pl.when(is_matched).then(pl.when(pl.col("awaited").is_null()).then(0).otherwise(wait))
    )


def _last_receiver_arrivals(table: pl.DataFrame) -> pl.Series:
    """Of each part that only sends, when the last of those came that it sends to and that came before it left."""
    only = table.filter(~pl.col("receives")).select("part", "meeting", "end")
    arrivals = table.filter("receives").select("meeting", came="start")
    last = only.join(arrivals, on="meeting").filter(pl.col("came") <= pl.col("end"))
    last_arrivals = last.group_by("part").agg(pl.col("came").max())
    return table.select("part").join(last_arrivals, on="part", how="left", maintain_order="left")["came"]
