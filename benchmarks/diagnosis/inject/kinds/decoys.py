"""Decoys: what looks like a problem in a trace and costs the job nothing."""

from __future__ import annotations

from ..draft import Call, Draft
from .kind import GPU, MULTI, Kind, Random, draw_rank, draw_slots


def clock_offset(draft: Draft, random: Random) -> None:
    """The clock of one rank is ahead, by up to 50 ms."""
    draft.shift_ns[draw_rank(draft, random)] = int(random.uniform(-50e6, 50e6))


def flushed_buffers(draft: Draft, random: Random) -> None:
    """The profiler flushes its buffers, and the host waits meanwhile."""
    occurrences = list(draw_slots(draft, random, 1))
    for slot in occurrences[int(random.integers(len(occurrences)))][1]:
        draft.add_calls(slot, [Call("Activity Buffer Request", 1.0, "overhead")])


DECOYS = (
    Kind("clock offset (decoy)", MULTI, clock_offset, (), scaled=False),
    Kind("profiler buffers (decoy)", GPU, flushed_buffers, ("profiler-overhead",)),
)
