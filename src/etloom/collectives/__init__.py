"""Collective instances across ranks: participations, matching, clocks, waiting and lateness.

- participations: one row per communication of a rank
- matching: the participations that form one collective instance
- clocks: offset and drift between the clocks of ranks
- waiting: how long each rank waited for others
- lateness: the rank that arrived last, and what it did in the meantime
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from etloom.collectives.clocks import COMPARABLE, correct_clocks, estimate_clocks
from etloom.collectives.matching import is_receiver, is_sender, match_participations
from etloom.collectives.participations import compute_message_size, get_bus_factor, list_participations
from etloom.core.trace import Job
from etloom.linker import check_linked

__all__ = [
    "MatchedCollectives",
    "correct_clocks",
    "estimate_clocks",
    "get_bus_factor",
    "match_participations",
    "compute_message_size",
    "list_participations",
    "match_collectives",
    "add_waits",
]


@dataclass(frozen=True, eq=False)
class MatchedCollectives:
    """The communications of a job, matched across ranks, with the clock of each rank.

    Attributes:
        parts: `matching.COLUMNS`, with start and end on the clock of the rank's reference, own_start and own_end on the
            rank's own clock, and residual, the remaining uncertainty of the clock (null if it cannot be compared).
        clocks: `clocks.COLUMNS`.
    """

    parts: pl.DataFrame
    clocks: pl.DataFrame

    @cached_property
    def comparable(self) -> pl.DataFrame:
        """Participations (ranks' calls of communications) with waiting times; unmatched if clocks are not comparable.

        A participation is one rank's call of a communication.

        Participations whose clock cannot be compared count as unmatched. Adds error, the largest possible difference of
        two clocks of the instance (null if unmatched), and `waiting.COLUMNS`.
        """
        comparable_instance = pl.when(pl.col("residual").is_not_null()).then("instance")
        table = _merge_by_operator(self.parts.with_columns(comparable_instance.alias("instance")))
        unmatched = pl.len().over("instance") < 2
        table = table.with_columns(
            pl.when(~unmatched & pl.col("instance").is_not_null()).then(name).alias(name)
            for name in ("instance", "how")
        )
        # Each clock differs from the reference by at most its residual, two clocks by the two largest residuals.
        max_clock_error = pl.col("residual").top_k(2).sum().over("instance")
        return add_waits(
            table.with_columns(error=pl.when(pl.col("instance").is_not_null()).then(max_clock_error))
        )


def match_collectives(job: Job) -> MatchedCollectives:
    """Match the communication of all ranks of a job on one clock. Raises LinkError if a rank is not linked."""
    return job.compute_once(_compute_matches)


def _compute_matches(job: Job) -> MatchedCollectives:
    tables = []
    for rank, trace in job.items():
        check_linked(trace, rank)
        tables.append(trace.compute_once(list_participations, rank))
    participations = pl.concat(tables)
    table = estimate_clocks(match_participations(participations), _identify_clocks(job))
    # Matches inferred from order and time are inferred again with corrected clocks.
    local_times = participations.select("rank", "event", own_start="start", own_end="end")
    matched = match_participations(correct_clocks(participations, table))
    matched = matched.join(local_times, on=("rank", "event"), how="left", maintain_order="left")
    residuals = table.filter(pl.col("verdict").is_in(COMPARABLE)).select("rank", residual="residual_ns")
    return MatchedCollectives(matched.join(residuals, on="rank", how="left", maintain_order="left"), table)


def _identify_clocks(job: Job) -> dict[int, str | None]:
    """Return the host of each rank whose times count from the epoch, and the file of ranks that one file holds.

    If a trace counts from a zero of its own, the host's clock gives no information.
    """
    clocks: dict[int, str | None] = {}
    files = {rank: str(trace.meta.get("files")) for rank, trace in job.items() if trace.meta.get("files")}
    shared = Counter(files.values())
    for rank, trace in job.items():
        if trace.meta.get("clock") == "epoch":
            clocks[rank] = trace.meta.get("host")
        elif shared[files.get(rank, "")] > 1:
            clocks[rank] = files[rank]
    return clocks


def _merge_by_operator(parts: pl.DataFrame) -> pl.DataFrame:
    """Merge the ranges that an operator of a rank caused into one participation, from the first start to the last end.

    A backend on the host may execute one operator in several ranges (gloo's reduce_scatter: one all-reduce per tensor).
    """
    key = ("rank", "where", "issuer", "collective", "source", "destination")
    is_split = (pl.col("where") == "host") & pl.col("issuer").is_not_null() & (pl.len().over(key) > 1)
    if not parts.select(is_split.any()).item():
        return parts
    first = pl.exclude(*key, "end", "own_end", "instance").sort_by("start", "event").first()
    ends = pl.col("end", "own_end").max()
    merged = (
        parts.filter(is_split).group_by(key, maintain_order=True).agg(first, ends, pl.col("instance").min())
    )
    return pl.concat((parts.filter(~is_split), merged.select(parts.columns))).sort("rank", "start", "event")


# Computes the waiting time of each rank in a collective instance, for all analyses.
#
# A rank waits for those whose data it receives. A rank that only sends may wait for its receivers: gloo holds a sender
# until the receiver is ready, NCCL releases a small message earlier. So a sender that departed before a receiver
# arrived did not wait for it. A receiver cannot depart before the data was sent: if clocks contradict this, it waited
# until it departed.

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
