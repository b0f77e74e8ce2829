"""What ranks do together: the parts each recorded, who met, how far their clocks differ.

parts      one row a rank's part of a communication
meetings   which parts are one communication
clocks     offset and drift of the clocks of ranks
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from etloom.collectives.clocks import clocks, on_one_clock
from etloom.collectives.meetings import meet
from etloom.collectives.parts import factor, message, parts
from etloom.errors import LinkError
from etloom.trace import Job

__all__ = ["Together", "clocks", "factor", "meet", "message", "parts", "together"]


@dataclass(frozen=True, eq=False)
class Together:
    """parts: `meetings.COLUMNS`, start and end on the clock of the reference rank, own_start and own_end on the rank's
    own. clocks: `clocks.COLUMNS`."""

    parts: pl.DataFrame
    clocks: pl.DataFrame


def together(job: Job) -> Together:
    """The communications of all ranks of a job, matched, on one clock. Raises LinkError if a rank is not linked."""
    for rank, trace in job.items():
        if not trace.meta.get("linked"):
            raise LinkError("the trace is not linked", where=f"rank {rank}", remedy="etloom.link(job)")
    found = pl.concat([parts(trace, rank) for rank, trace in job.items()])
    table = clocks(meet(found))
    # What is told from order and time is told again where a clock was off.
    own = found.select("rank", "event", own_start="start", own_end="end")
    met = meet(on_one_clock(found, table))
    return Together(met.join(own, on=("rank", "event"), how="left", maintain_order="left"), table)
