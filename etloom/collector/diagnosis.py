"""Why a run recorded nothing, or nothing of a rank: a sentence for each cause, by what its processes saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .options import Options
from .session.messages import count_noun, format_ranges

Facts = dict[str, Any]
_LOST_PYTHONPATH = "(python -I, -E, -S, env -i, a container)"


def explain_empty_run(options: Options, seen: Sequence[Facts], returncode: int = 0) -> str:
    """The cause, and what to do; `seen` is what each process that imported torch.optim left (seen.Seen).

    A command that failed, by its `returncode`, is the first cause to look at.
    """
    failed = f"the command ended with status {returncode}"
    if not seen and returncode:
        return f"{failed} before a Python of it imported torch.optim, or PYTHONPATH was lost on the way {_LOST_PYTHONPATH}"
    if not seen:
        return f"no Python of the command imported torch.optim; was PYTHONPATH lost on the way {_LOST_PYTHONPATH}?"
    why = _explain_from_statuses(options, seen)
    return f"{failed}; {why}" if returncode else why


def _explain_from_statuses(options: Options, seen: Sequence[Facts]) -> str:
    """As the processes tell it."""
    stepped = [facts for facts in seen if facts.get("began")]
    if stepped and all(facts.get("left_out") for facts in stepped):
        ran = format_ranges(sorted({facts["rank"] for facts in stepped}))
        return f"--ranks {format_ranges(list(options.ranks or ()))} names none of the ranks that ran, {ran}"
    reasons = Counter(
        explain_unrecorded_process(options, facts) for facts in stepped if not facts.get("left_out")
    )
    if reasons:
        # A helper process of the job may have its own cause; that of most, and of the first of them, counts.
        return reasons.most_common(1)[0][0]
    return _explain_no_steps(options, seen)


def explain_unrecorded_process(options: Options, facts: Facts) -> str:
    """Why one process, in which steps were counted, recorded nothing."""
    if facts.get("left_out"):
        return "--ranks leaves it out"
    if facts.get("missed"):
        return str(facts["missed"][-1])
    steps, ended = facts.get("steps", 0), facts.get("ended")
    if not ended:
        return (
            f"its process was ended from outside, or left by os._exit, before step {options.first} began"
            if options.on_demand is None
            else "its process was ended from outside, or left by os._exit, outside of a window"
        )
    of = "" if options.step_ns is None else f" of {options.step_ns / 1e6:g} ms"
    made = f"the job ended after {count_noun(steps, 'step')}{of}"
    if options.on_demand is not None:
        asked = facts.get("asked")
        if asked:
            return f"{made}, before step {asked[0]}, asked for, began"
        return f"{'asked too late' if facts.get('late') else 'nobody asked'}: {made}"
    if not steps and facts.get("optimizer"):
        return f"no optimizer's .step() returned: a {facts['optimizer']} was made and made no step"
    return f"{made}, before step {options.first} began (steps {options.steps}); ask for earlier steps"


def _explain_no_steps(options: Options, seen: Sequence[Facts]) -> str:
    """No process counted a step."""
    where = f"in {len(seen)} processes with torch" if len(seen) > 1 else "in the process with torch"
    if options.step_ns is not None:
        return f"no torch.nn.Module was made {where}, from which steps of time are counted"
    if options.marked:
        return (
            f"no ProfilerStep#N was seen {where}: its own torch.profiler made no step, or there is none; "
            "leave out --step-by profiler"
        )
    if options.step_name is not None:
        names: Counter[str] = Counter()
        for facts in seen:
            names.update(dict(facts.get("names") or ()))
        some = ", ".join(f"{name!r} {count_noun(times, 'time')}" for name, times in names.most_common(3))
        told = f"seen most: {some}" if some else "none was entered"
        return f"--step-name {options.step_name!r} finds no name of a record_function {where} ({told})"
    return (
        f"no torch.optim.Optimizer was made {where}; for a loop without one take --step-name, --step-by 500ms "
        "or etloom.record"
    )


def describe_ring(ranks: Sequence[Facts]) -> str | None:
    """What the ring of these sealed ranks still holds, where it overwrote anything."""
    lost = [facts for facts in ranks if (facts.get("ring") or {}).get("overwritten_operators")]
    if not lost:
        return None
    # Of several ranks, the one that holds least: what is there of all of them.
    least = min(lost, key=lambda facts: len(facts["steps"]))
    since_ns = least["ring"]["whole_since_ns"]
    kept = count_noun(len(least["steps"]), "whole step")
    named = f" ({format_ranges(least['steps'])})" if least["steps"] else ""
    held, before = (least["end_ns"] - since_ns) / 1e9, (since_ns - least["start_ns"]) / 1e9
    return (
        f"the ring holds {kept}{named} of the last {held:.3g} s"
        + (f" of rank {least['rank']}, which holds least" if len(ranks) > 1 else "")
        + f"; {count_noun(least['ring']['overwritten_operators'], 'operator')} of the {before:.3g} s before are "
        "overwritten (a larger --max-size keeps more)"
    )
