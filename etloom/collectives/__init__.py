"""What ranks do together: the parts each recorded, who met, how far their clocks differ.

parts      one row a rank's part of a communication
meetings   which parts are one communication
clocks     offset and drift of the clocks of ranks
waits      how long each rank stood waiting for others
lateness   who kept them waiting, and what it did meanwhile
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from etloom.collectives.clocks import COMPARABLE, correct_clocks, estimate_clocks
from etloom.collectives.matching import match_participations
from etloom.collectives.participations import compute_message_size, get_bus_factor, list_participations
from etloom.collectives.waiting import add_waits
from etloom.core.trace import Job
from etloom.linker import check_linked

__all__ = [
    "MatchedCollectives",
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
    """parts: `meetings.COLUMNS`, start and end on the clock of the rank's reference, own_start and own_end on the
    rank's own; residual, how far that clock may still be off, null where it cannot be compared. clocks:
    `clocks.COLUMNS`."""

    parts: pl.DataFrame
    clocks: pl.DataFrame

    @cached_property
    def comparable(self) -> pl.DataFrame:
        """The parts, those of one operator as one, of which those whose clock cannot be compared met nobody;
        error, how far apart two clocks of a meeting may be (null without one); and `waits.COLUMNS`."""
        instance = pl.when(pl.col("residual").is_not_null()).then("meeting")
        table = _merge_by_operator(self.parts.with_columns(instance.alias("meeting")))
        alone = pl.len().over("meeting") < 2
        table = table.with_columns(
            pl.when(~alone & pl.col("meeting").is_not_null()).then(name).alias(name)
            for name in ("meeting", "how")
        )
        # Each is so far from the reference at most: two are apart by the two greatest.
        clock_error = pl.col("residual").top_k(2).sum().over("meeting")
        return add_waits(table.with_columns(error=pl.when(pl.col("meeting").is_not_null()).then(clock_error)))


def match_collectives(job: Job) -> MatchedCollectives:
    """The communications of all ranks of a job, matched, on one clock. Raises LinkError if a rank is not linked."""
    return job.compute_once(_compute_matches)


def _compute_matches(job: Job) -> MatchedCollectives:
    for rank, trace in job.items():
        check_linked(trace, rank)
    participations = pl.concat([trace.compute_once(list_participations, rank) for rank, trace in job.items()])
    # Of a trace that counts from its own zero the host's clock tells nothing.
    hosts = {
        rank: trace.meta.get("host") for rank, trace in job.items() if trace.meta.get("clock") == "epoch"
    }
    table = estimate_clocks(match_participations(participations), hosts)
    # What is told from order and time is told again where a clock was off.
    own_times = participations.select("rank", "event", own_start="start", own_end="end")
    matched = match_participations(correct_clocks(participations, table))
    matched = matched.join(own_times, on=("rank", "event"), how="left", maintain_order="left")
    residuals = table.filter(pl.col("verdict").is_in(COMPARABLE)).select("rank", residual="residual_ns")
    return MatchedCollectives(matched.join(residuals, on="rank", how="left", maintain_order="left"), table)


def _merge_by_operator(parts: pl.DataFrame) -> pl.DataFrame:
    """A backend on the host may work off one operator in several ranges (gloo's reduce_scatter: an all-reduce for each
    of its tensors): one part, from the first start to the last end."""
    key = ("rank", "where", "issuer", "collective", "source", "destination")
    several = (pl.col("where") == "host") & pl.col("issuer").is_not_null() & (pl.len().over(key) > 1)
    if not parts.select(several.any()).item():
        return parts
    first = pl.exclude(*key, "end", "own_end", "meeting").sort_by("start", "event").first()
    ends = pl.col("end", "own_end").max()
    merged = (
        parts.filter(several).group_by(key, maintain_order=True).agg(first, ends, pl.col("meeting").min())
    )
    return pl.concat((parts.filter(~several), merged.select(parts.columns))).sort("rank", "start", "event")
