"""Communications matched across the ranks of a job."""

from __future__ import annotations

from etloom.collectives import MatchedCollectives, match_collectives
from etloom.core.errors import AnalysisError
from etloom.core.text import format_ranks
from etloom.core.trace import Job


def match_communications(job: Job) -> MatchedCollectives:
    """Match the communications of a job; raise AnalysisError if it has none."""
    matched = match_collectives(job)
    if not matched.parts.height:
        raise AnalysisError(
            "the run contains no communication on a device or with gloo",
            remedy="record several ranks, with the profiler's CUDA activity if they use NCCL",
        )
    return matched


def match_comparable_ranks(job: Job) -> MatchedCollectives:
    """Match the communications of a job across its ranks, if the clocks of the ranks can be compared.

    Raises:
        AnalysisError: Only one rank was recorded, or the ranks share no communication, so that their clocks cannot be
            compared.
    """
    matched = match_communications(job)
    if len(job) < 2:
        raise AnalysisError(
            "waits between ranks need at least two ranks", remedy="open the folder with all ranks"
        )
    if not matched.clocks["verdict"].is_in(["agrees", "unsure", "corrected"]).any():
        reason = "no communication could be matched across ranks, so their clocks cannot be compared"
        if "impossible" in matched.clocks["verdict"]:
            reason = "the ranks are not of one run: for any clock offset, some left a collective before others arrived"
        elif matched.parts["instance"].count():
            reason = "messages in one direction only do not bound the clock offset of their ranks"
        raise AnalysisError(
            reason, remedy=f"record ranks that share a process group; recorded: {format_ranks(job)}"
        )
    return matched
