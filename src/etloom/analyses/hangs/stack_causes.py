"""Cause of a hang from the Python stacks of all ranks, without knowledge of their calls.

A rank waits if its main thread is in a function of torch.distributed; or, if no rank is there and nothing has changed
since an earlier file, in a backward pass or a synchronization, which may wait in native code. The ranks that do not
answer, or else those that do not wait, are named with the line where they are. If all ranks are in communication, those
that are in another call than most of them are named.

A healthy job can look the same at one moment, and one with a slow rank also at two. The sentence states whether the
ranks that wait were at the same place in an earlier file. If they have moved and no process has ended since, the job
makes progress, and no rank is named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import polars as pl

from etloom.analyses.hangs.causes import _MAX_EVIDENCE, EVIDENCE_COLUMNS, HangCause
from etloom.analyses.hangs.processes import ProcessState, find_place
from etloom.core.calls import RankStacks
from etloom.core.text import count_noun, format_ranks

_CALL = re.compile(r"([a-z]\w*) \(.*torch[/\\]distributed[/\\]")
_MAY_WAIT = re.compile(r"torch[/\\](?:autograd[/\\]graph\.py|cuda[/\\])")
_NO_CONNECTION, _NO_ANSWER = 503, 408
"""Status of requests to a process that has ended, and to one that does not answer in time."""


def describe_stacks(stacks: RankStacks) -> dict[int, ProcessState]:
    """Return the state of each rank's process, as far as its stack shows it."""
    states = {rank: _describe(frames) for rank, frames in stacks.frames.items()}
    reasons = {_NO_CONNECTION: "no connection", _NO_ANSWER: "no answer in time"}
    for rank, status in stacks.errors.items():
        condition = "ended" if status == _NO_CONNECTION else "unresponsive"
        reason = reasons.get(status, f"status {status}")
        states[rank] = ProcessState(condition, f"{reason}, when the debug server asked")
    return dict(sorted(states.items()))


def find_stack_cause(stacks: RankStacks, earlier: RankStacks | None = None) -> HangCause | None:
    """Return the cause of a hang; None if no rank differs, or if the ranks that wait have moved since ``earlier``, in
    which the same processes answered."""
    states = describe_stacks(stacks)
    waiting = {rank for rank, state in states.items() if state.place == "communication"}
    before = {} if earlier is None else earlier.frames
    is_stuck = bool(before) and all(before.get(rank) == stacks.frames[rank] for rank in waiting)
    if not waiting and before == stacks.frames:
        waiting = _find_native_waits(stacks.frames)
        is_stuck = bool(waiting)
    ended = {rank for rank in before if rank in stacks.errors and states[rank].condition == "ended"}
    if not waiting or (before and not is_stuck and not ended):
        return None
    since = "" if ended else "; one file does not show whether it hangs"
    if is_stuck and earlier is not None:
        since = f"; the same in {earlier.name}"
    if others := set(states) - waiting:
        since += ": a hang, or the same rank is always late" if is_stuck else ""
        return _blame_absent(stacks, states, others, waiting, since + _describe_end(stacks), before)
    return _blame_other_calls(
        stacks, states, is_stuck and stacks.cut_rank is None, since + _describe_end(stacks)
    )


def describe_no_cause(stacks: RankStacks, earlier: RankStacks | None) -> str:
    """Return the sentence for stacks in which no rank differs."""
    count = count_noun(len(stacks.frames) + len(stacks.errors), "rank")
    silent = f"; {format_ranks(stacks.errors)} did not answer" if stacks.errors else ""
    silent += _describe_end(stacks)
    if earlier is None:
        return f"no cause in the stacks of {count}: no rank differs; two files show whether the job moves{silent}"
    if all(earlier.frames.get(rank) == frames for rank, frames in stacks.frames.items()):
        same = f"which are the same in {earlier.name}"
        return f"no cause in the stacks of {count}, {same}: no rank differs from most{silent}"
    return f"no hang in the stacks of {count}: they have changed since {earlier.name}{silent}"


def _describe_end(stacks: RankStacks) -> str:
    """Return the part of a sentence that says where a file ends early, if it does."""
    if stacks.cut_rank is None:
        return ""
    return f"; the file ends in the stack of rank {stacks.cut_rank}: this rank and those after it are unknown"


def _find_native_waits(frames: Mapping[int, tuple[str, ...]]) -> set[int]:
    """Return the ranks in code that may wait in native code, or else the majority at one place."""
    waits = {rank for rank, stack in frames.items() if _MAY_WAIT.search(stack[0])}
    if not waits:
        (stack, count), *_ = Counter(frames.values()).most_common(1) or [((), 0)]
        waits = {rank for rank, each in frames.items() if each == stack} if 2 * count > len(frames) else set()
    return waits if len(waits) < len(frames) else set()


def _blame_absent(
    stacks: RankStacks,
    states: Mapping[int, ProcessState],
    others: set[int],
    waiting: set[int],
    since: str,
    before: Mapping[int, tuple[str, ...]],
) -> HangCause:
    """Return the cause for ranks that do not answer or, if all do, are not where the others wait."""
    silent = others.intersection(stacks.errors)
    named = silent or others
    conditions = {states[rank].condition for rank in named}
    if silent:
        kind = "crashed" if conditions == {"ended"} else "unresponsive"
        text = f"{format_ranks(named)} did not arrive: {states[min(named)].detail}"
        last = [stack for rank in sorted(named) if (stack := before.get(rank))]
        text += f", the main thread was in {_describe(last[0]).frame or last[0][0]}" if last else ""
    else:
        places = Counter(state.place for rank in named if (state := states[rank]).place)
        kind = str(places.most_common(1)[0][0]) if places else "not arrived"
        frames = Counter(states[rank].frame or stacks.frames[rank][0] for rank in sorted(named))
        text = (
            f"{format_ranks(named)} stopped or diverged: the main thread is in {frames.most_common(1)[0][0]}"
        )
        text += f" ({kind})" if places else ""
    target = "it" if len(named) == 1 else "them"
    verb = "waits" if len(waiting) == 1 else "wait"
    text += (
        f"; {count_noun(len(waiting), 'rank')} {verb} for {target} in {_name_most_common(stacks, waiting)}"
    )
    return HangCause(kind, tuple(sorted(named)), text + since, _list_evidence(stacks, states, named))


def _blame_other_calls(
    stacks: RankStacks, states: Mapping[int, ProcessState], is_stuck: bool, since: str
) -> HangCause | None:
    """Return the cause if all ranks are in communication: the ranks in another call than most, if there is one."""
    calls = {rank: _name_call(stacks.frames[rank]) for rank in states}
    (call, count), *rest = Counter(calls.values()).most_common()
    if not rest:
        text = f"all {len(calls)} ranks wait in {call}: suspect a link, a device or sizes that differ"
        return HangCause("link", (), text + since, _list_evidence(stacks, states, ())) if is_stuck else None
    named = {rank for rank, each in calls.items() if each != call} if 2 * count > len(calls) else set(calls)
    text = f"{format_ranks(named)} diverged with another call, {calls[min(named)]}"
    if len(named) < len(calls):
        text += f"; {count_noun(count, 'rank')} wait in {call}"
    else:
        text += "; no side has a majority"
    return HangCause(
        "other collective", tuple(sorted(named)), text + since, _list_evidence(stacks, states, named)
    )


def _describe(frames: tuple[str, ...]) -> ProcessState:
    place, frame = find_place(frames)
    return ProcessState("running", "answered the debug server", place, frame)


def _name_most_common(stacks: RankStacks, ranks: set[int]) -> str:
    return Counter(_name_call(stacks.frames[rank]) for rank in sorted(ranks)).most_common(1)[0][0]


def _name_call(frames: tuple[str, ...]) -> str:
    """Return the call in which a rank waits: the function of torch.distributed, and the line that called it."""
    functions = [match[1] for frame in frames if (match := _CALL.match(frame))]
    function = next((name for name in functions if name != "wrapper"), None)
    frame = find_place(frames)[1] or frames[0]
    return f"{function}, called at {frame}" if function else frame


def _list_evidence(
    stacks: RankStacks, states: Mapping[int, ProcessState], ranks: set[int] | tuple[int, ...]
) -> pl.DataFrame:
    rows = [
        (
            rank,
            f"main thread: {states[rank].frame or stacks.frames[rank][0]}"
            if rank in stacks.frames
            else f"process {states[rank].condition}: {states[rank].detail}",
        )
        for rank in sorted(ranks)[:_MAX_EVIDENCE]
    ]
    return pl.DataFrame(rows, schema=EVIDENCE_COLUMNS, orient="row")
