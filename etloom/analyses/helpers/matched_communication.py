"""What the ranks of a job do together, or why nothing can be said of it."""

from __future__ import annotations

from etloom.collectives import MatchedCollectives, match_collectives
from etloom.core.errors import AnalysisError
from etloom.core.text import format_ranks
from etloom.core.trace import Job


def match_communications(job: Job) -> MatchedCollectives:
    """`together`; raises AnalysisError for a job that holds no communication."""
    found = match_collectives(job)
    if not found.parts.height:
        raise AnalysisError(
            "the run holds no communication on a device or by gloo",
            remedy="trace a run of several ranks, with the profiler's CUDA activity where it uses NCCL",
        )
    return found


def match_comparable_ranks(job: Job) -> MatchedCollectives:
    """`communications` of a job whose ranks can be compared.

    Raises AnalysisError where ranks did nothing together, so that their clocks cannot be, and for one rank alone.
    """
    found = match_communications(job)
    if len(job) < 2:
        raise AnalysisError(
            "one rank alone does not say who waited for whom", remedy="open the folder that holds all ranks"
        )
    if not found.clocks["verdict"].is_in(["agrees", "unsure", "corrected"]).any():
        why = (
            "no communication of one rank could be matched with another's, so their clocks cannot be compared"
        )
        if "impossible" in found.clocks["verdict"]:
            why = "the ranks cannot be of one run: however their clocks are set, some left before others came"
        elif found.parts["meeting"].count():
            why = "messages of one direction do not tell how far the clocks of their ranks may be apart"
        raise AnalysisError(
            why, remedy=f"record ranks that share a process group; recorded: {format_ranks(job)}"
        )
    return found
