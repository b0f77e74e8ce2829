"""Describes how the processes of a run ended, and which traces are lost because processes were killed.

`ended` of rank_<r>.json is {"how": "exited"}, with any status; "raised" with the class of the exception as `error`;
or "killed" by a signal, from which os._exit cannot be distinguished. `in_window`: before the window was written. It is
null if nobody observed the end: the launcher was killed too, or there was none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from .text import format_ranges, format_ranks

Facts = dict[str, Any]
STARTED_FILE = "started"
"""An empty file in the folder of a window that was started, not only prepared."""
KILLED_NOTE = "killed.json"
"""The facts of a window, next to its unfinished files, in case its process is killed.

Its members `window` (the folder of the window, relative to that of the run) and `command` are additional."""
KILLED_IN_WINDOW = {"how": "killed", "in_window": True, "error": None}
_WRITTEN_AT_CLOSE = {
    "kineto": ("kineto_trace_", "Kineto trace"),
    "flight_recorder": ("flight_recorder_", "Flight Recorder dump"),
}
"""Sources that write nothing until the window closes: prefix of their files -> their name."""


def process_ending(status: Facts) -> Facts:
    """Return how a process ended after its window was written: a dict with the keys how, in_window and error."""
    error = status.get("raised")
    kind = "killed" if not status.get("ended") else "raised" if error else "exited"
    return {"how": kind, "in_window": False, "error": error}


def describe_endings(ranks: Iterable[Facts]) -> str | None:
    """Return a sentence that lists the ranks that were killed or ended with an exception; None if there are none."""
    groups: dict[tuple[bool, str], list[int]] = {}  # whether killed, and when or by which error -> ranks
    for facts in ranks:
        ending = facts.get("ended") or {}
        if ending.get("how") == "killed":
            when = "after {their} window"
            if ending.get("in_window"):
                when = "while {their} window was written" if facts.get("end_ns") else "in {their} window"
            groups.setdefault((True, when), []).append(facts["rank"])
        elif ending.get("how") == "raised":
            groups.setdefault((False, f"{ending.get('error')}"), []).append(facts["rank"])
    sentences = []
    for (is_killed, detail), numbers in groups.items():
        subject = format_ranks(sorted(numbers))
        if is_killed:
            verb, their = ("was", "its") if len(numbers) == 1 else ("were", "their")
            sentences.append(f"{subject} {verb} killed {detail.format(their=their)}, or ended by os._exit")
        else:
            sentences.append(f"{subject} ended with {detail}")  # from a file: not a format string
    return "; ".join(sentences) or None


def describe_losses(ranks: Iterable[Facts]) -> str | None:
    """Return a sentence on traces and steps lost because processes were killed in a window; None if nothing is lost."""
    endings = [(facts, facts.get("ended") or {}) for facts in ranks]
    killed = [facts for facts, end in endings if end.get("how") == "killed" and end.get("in_window")]
    sentences = []
    for source, (prefix, name) in _WRITTEN_AT_CLOSE.items():
        missing = [
            facts["rank"]
            for facts in killed
            if source in (facts.get("sources") or ())
            and not any(file.startswith(prefix) for file in facts.get("files") or ())
        ]
        if missing:
            sentences.append(
                f"the {name} of {format_ranks(sorted(missing))} is lost: it is written when a window closes"
            )
    if (steps := _describe_steps(killed, even_if_complete=bool(sentences))) is not None:
        sentences.append(steps)
    return "; ".join(sentences) or None


def describe_recovered(ranks: Iterable[Facts]) -> str:
    """Return a sentence on what was recovered from ranks that were killed in their window, and on what is lost."""
    losses = describe_losses(ranks)
    return f"the native observer's trace up to then is kept{f', but {losses}' if losses else ''}"


def requested_steps(ranks: Iterable[Facts]) -> str | None:
    """Return the steps requested for recording, as `3-399` or `3 on`; None if they differ by rank or are unknown."""
    requests = {str(facts.get("steps_asked")) for facts in ranks}
    match = re.fullmatch(r"(\d{1,18}):(\d{0,18})", requests.pop(), re.ASCII) if len(requests) == 1 else None
    if match is None:
        return None
    if not match[2]:
        return f"{match[1]} on"
    first, last = int(match[1]), int(match[2]) - 1
    return f"{first}-{last}" if first < last else str(first)


def _describe_steps(ranks: Sequence[Facts], even_if_complete: bool) -> str | None:
    """Describe which of the requested steps all ranks recorded; None for all of them, unless `even_if_complete`."""
    requested = requested_steps(ranks)
    if requested is None:
        return None
    recorded = [facts.get("steps") for facts in ranks]
    if any(steps is None for steps in recorded):
        return f"not all of steps {requested} are recorded"
    common = sorted(set(recorded[0] or ()).intersection(*(steps or () for steps in recorded[1:])))
    complete = format_ranges(common)
    if not even_if_complete and (complete == requested or requested.endswith(" on")):
        return None
    suffix = " by each of them" if len(ranks) > 1 else ""
    if not complete:
        return f"no complete step of {requested} is recorded{suffix}"
    return f"steps {complete} of {requested} are recorded{suffix}"
