"""Decoys: what looks like a problem in a trace and costs the job nothing."""

from __future__ import annotations

from etloom.graphs.graph import EdgeKind
from etloom.timeline.activity import find_steps

from ..draft import Call, Draft
from .kind import GPU, MULTI, Kind, Random, draw_rank, draw_slots, find_edges


def clock_offset(draft: Draft, random: Random) -> None:
    """The clock of one rank is ahead, by up to 50 ms."""
    draft.shift_ns[draw_rank(draft, random)] = int(random.uniform(-50e6, 50e6))


def flushed_buffers(draft: Draft, random: Random) -> None:
    """The profiler flushes its buffers, and the host waits meanwhile."""
    occurrences = list(draw_slots(draft, random, 1))
    for slot in occurrences[int(random.integers(len(occurrences)))][1]:
        draft.add_calls(slot, [Call("Activity Buffer Request", 1.0, "overhead")])


def slow_first_step(draft: Draft, random: Random) -> None:
    """The host is slower in the first step, which is warm-up."""
    edges = find_edges(draft, EdgeKind.SEGMENT, EdgeKind.IDLE)
    end = min(int(find_steps(trace)["end"][0]) for trace in draft.base.job.values())
    edges = edges[draft.graph.time[draft.base.target[edges]] <= end]
    draft.weight[edges] += draft.lag[edges]


def recorded_stacks(draft: Draft, random: Random) -> None:
    """Stacks of Python are recorded: many more events, and a host that is a little slower between operators."""
    frames = ("torch/nn/modules/module.py(1553): _wrapped_call_impl", "train.py(31): forward")
    count = int(random.integers(100, 300))
    for _, slots in draw_slots(draft, random, count):
        for slot in slots:
            draft.add_calls(slot, [Call(name, fixed=500, cat="python_function") for name in frames])


DECOYS = (
    Kind("slow first step (decoy)", GPU, slow_first_step, ("warm-up",)),
    Kind("recorded stacks (decoy)", GPU, recorded_stacks, (), scaled=False),
    Kind("clock offset (decoy)", MULTI, clock_offset, (), scaled=False),
    Kind("profiler buffers (decoy)", GPU, flushed_buffers, ("profiler-overhead",)),
)
