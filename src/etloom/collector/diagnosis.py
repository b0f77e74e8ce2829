"""Explains why a run or a rank recorded nothing, and which steps a ring buffer still contains.

Each explanation is one sentence, derived from the status files of the job's processes (session/process_status.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .options import RecordingOptions
from .text import count_noun, format_ranges

Facts = dict[str, Any]
_LOST_PYTHONPATH = "(python -I, -E, -S, env -i, a container)"


def explain_empty_run(options: RecordingOptions, statuses: Sequence[Facts], exit_status: int = 0) -> str:
    """Return a sentence that explains why a run recorded nothing, often with a suggestion for the user.

    Args:
        options: Options of the recording.
        statuses: The status of each process that imported torch.optim.
        exit_status: Exit status of the command; a failure is the most likely cause.
    """
    failure = f"the command ended with status {exit_status}"
    if not statuses and exit_status:
        return f"{failure} before a Python imported torch.optim, or PYTHONPATH was lost on the way {_LOST_PYTHONPATH}"
    if not statuses:
        return f"no Python of the command imported torch.optim; was PYTHONPATH lost on the way {_LOST_PYTHONPATH}?"
    reason = _explain_from_statuses(options, statuses)
    return f"{failure}; {reason}" if exit_status else reason


def _explain_from_statuses(options: RecordingOptions, statuses: Sequence[Facts]) -> str:
    counting = [status for status in statuses if status.get("began")]
    if counting and all(status.get("excluded") for status in counting):
        ranks = format_ranges(sorted({status["rank"] for status in counting}))
        selected = format_ranges(list(options.ranks or ()))
        return f"--ranks {selected} excludes all ranks of the job, {ranks}"
    reasons = Counter(
        explain_unrecorded_process(options, status) for status in counting if not status.get("excluded")
    )
    if reasons:
        # A helper process of the job may have a reason of its own; report the most common, earliest one.
        return reasons.most_common(1)[0][0]
    return _explain_no_steps(options, statuses)


def explain_unrecorded_process(options: RecordingOptions, status: Facts) -> str:
    """Return a phrase that explains why a process recorded nothing although its steps were counted."""
    if status.get("excluded"):
        return "--ranks excludes it"
    if status.get("missed"):
        return str(status["missed"][-1])
    steps = status.get("steps", 0)
    if not status.get("ended"):
        when = f"before step {options.first} began" if options.on_demand is None else "outside of a window"
        return f"its process was killed, or ended by os._exit, {when}"
    unit = "" if options.step_ns is None else f" of {options.step_ns / 1e6:g} ms"
    ending = f"the job ended after {count_noun(steps, 'step')}{unit}"
    if options.on_demand is not None:
        if window := status.get("requested"):
            return f"{ending}, before requested step {window[0]} began"
        return f"{'the request came too late' if status.get('late') else 'no window was requested'}: {ending}"
    if not steps and status.get("optimizer"):
        return f"no optimizer's .step() returned: the {status['optimizer']} that was created made no step"
    return f"{ending}, before step {options.first} began (steps {options.step_range}); choose earlier steps"


def _explain_no_steps(options: RecordingOptions, statuses: Sequence[Facts]) -> str:
    """Return a sentence that explains why no process of the job counted a training step."""
    processes = (
        f"in {len(statuses)} processes with torch" if len(statuses) > 1 else "in the process with torch"
    )
    if options.step_ns is not None:
        return f"no torch.nn.Module was created {processes}; steps by time begin with the first one"
    if options.job_marks_steps:
        return (
            f"no ProfilerStep#N was recorded {processes}: the job has no torch.profiler, or it makes no steps; "
            "leave out --step-by profiler"
        )
    if options.step_name is not None:
        names: Counter[str] = Counter()
        for status in statuses:
            names.update(dict(status.get("names") or ()))
        frequent = ", ".join(f"{name!r} {count_noun(count, 'time')}" for name, count in names.most_common(3))
        summary = f"most frequent: {frequent}" if frequent else "none was entered"
        return f"--step-name {options.step_name!r} matches no record_function {processes} ({summary})"
    return (
        f"no torch.optim.Optimizer was created {processes}; for a loop without one use --step-name, "
        "--step-by 500ms or etloom.record"
    )


def describe_ring(ranks: Sequence[Facts]) -> str | None:
    """Return a text on the complete steps that the ranks' ring buffers still hold; None if nothing was overwritten."""
    overwritten = [facts for facts in ranks if (facts.get("ring") or {}).get("overwritten_operators")]
    if not overwritten:
        return None
    # Of several ranks the one with the fewest steps: these are available on all of them.
    shortest = min(overwritten, key=lambda facts: len(facts["steps"]))
    steps = shortest["steps"]
    since_ns = shortest["ring"]["whole_since_ns"]
    duration_s = (shortest["end_ns"] - since_ns) / 1e9
    overwritten_s = (since_ns - shortest["start_ns"]) / 1e9
    contents = count_noun(len(steps), "complete step") + (f" ({format_ranges(steps)})" if steps else "")
    rank = f" of rank {shortest['rank']}, the shortest one" if len(ranks) > 1 else ""
    operators = count_noun(shortest["ring"]["overwritten_operators"], "operator")
    return (
        f"the ring holds {contents} of the last {duration_s:.3g} s{rank}; {operators} of the {overwritten_s:.3g} s "
        "before are overwritten (a larger --max-size keeps more)"
    )
