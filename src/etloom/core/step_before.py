"""The step time before a recording, which `etloom collect` notes in run.json."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from etloom.core.trace import Job


@dataclass(frozen=True)
class StepBefore:
    """The step time before the recording (median over ranks, ns), and the least number of steps timed on a rank."""

    step_ns: int
    steps: int


def find_step_before(job: Job) -> StepBefore | None:
    """Return the step time before the recording, from run.json; None if it is not known."""
    run = job.meta.get("run")
    ranks = run.get("ranks") if isinstance(run, dict) else None
    valid_ranks = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    facts = [rank.get("unrecorded") for rank in valid_ranks if not _has_host_times_only(rank)]
    pairs = [(fact.get("step_ns"), fact.get("steps")) for fact in facts if isinstance(fact, dict)]
    valid = [pair for pair in pairs if all(type(number) is int and 0 < number < 1 << 53 for number in pair)]
    if not valid:
        return None
    times, steps = zip(*valid, strict=True)
    return StepBefore(int(statistics.median(times)), min(steps))


def _has_host_times_only(rank: dict[str, Any]) -> bool:
    """Return whether a rank with a CUDA device timed its steps on the host only, which may run ahead of the device."""
    fact = rank.get("unrecorded")
    return (
        isinstance(fact, dict) and fact.get("clock") == "host" and str(rank.get("device")).startswith("cuda")
    )
