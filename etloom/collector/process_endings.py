"""How the processes of a run ended, as far as anybody saw it.

`ended` of rank_<r>.json says how: {"how": "exited"}, with whatever status, "raised" with the class of the exception as
`error`, or "killed", by a signal, which os._exit looks like from outside; `in_window`: before the window was written.
Null where nobody looked: the launcher was killed too, or there was none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from .session.messages import format_ranges

Facts = dict[str, Any]
STARTED_FILE = "started"
"""An empty file in the folder of a window that was not only prepared."""
KILLED_NOTE = "killed.json"
"""What a window leaves beside its unfinished files, for the case that its process is killed: its facts as far as they
are known, and as `window` and `command` its folder in that of the run and what runs."""
KILLED_IN_WINDOW = {"how": "killed", "in_window": True, "error": None}
_WRITTEN_AT_CLOSE = {
    "kineto": ("kineto_trace_", "Kineto trace"),
    "flight_recorder": ("flight_recorder_", "Flight Recorder dump"),
}
"""Sources that leave nothing of a window that does not close: how their files' names begin, and what they are."""


def ending_of_process(seen: Facts) -> Facts:
    """How a process ended whose window is written, by what it left for the launcher (seen.Seen)."""
    error = seen.get("raised")
    how = "killed" if not seen.get("ended") else "raised" if error else "exited"
    return {"how": how, "in_window": False, "error": error}


def describe_endings(ranks: Iterable[Facts]) -> str | None:
    """Which ranks did not end in order, in words; null where all did, or nobody knows."""
    groups: dict[tuple[bool, str], list[int]] = {}  # killed or not, and the words for it
    for facts in ranks:
        ended = facts.get("ended") or {}
        if ended.get("how") == "killed":
            written = "as {their} window was written" if facts.get("end_ns") else "in {their} window"
            when = written if ended.get("in_window") else "after {their} window"
            groups.setdefault((True, when), []).append(facts["rank"])
        elif ended.get("how") == "raised":
            groups.setdefault((False, f"{ended.get('error')}"), []).append(facts["rank"])
    said = []
    for (killed, what), numbers in groups.items():
        one = len(numbers) == 1
        if killed:
            when = what.format(their="its" if one else "their")
            words = f"{'was' if one else 'were'} ended from outside {when}, or left by os._exit"
        else:
            words = f"ended by {what}"  # of a file: no format
        said.append(f"{'rank' if one else 'ranks'} {format_ranges(sorted(numbers))} {words}")
    return "; ".join(said) or None


def describe_losses(ranks: Iterable[Facts]) -> str | None:
    """What is missing of the window that was asked for, as processes ended in it, in words; null where nothing is."""
    ended = [(facts, facts.get("ended") or {}) for facts in ranks]
    cut = [facts for facts, end in ended if end.get("how") == "killed" and end.get("in_window")]
    said = []
    for source, (prefix, name) in _WRITTEN_AT_CLOSE.items():
        without = [
            facts["rank"]
            for facts in cut
            if source in (facts.get("sources") or ())
            and not any(file.startswith(prefix) for file in facts.get("files") or ())
        ]
        if without:
            whose = f"{'rank' if len(without) == 1 else 'ranks'} {format_ranges(sorted(without))}"
            said.append(f"the {name} of {whose} is lost: it is written when a window closes")
    if (steps := _describe_steps(cut, bool(said))) is not None:
        said.append(steps)
    return "; ".join(said) or None


def describe_kept(ranks: Iterable[Facts]) -> str:
    """Of ranks whose processes ended in their window."""
    missing = describe_losses(ranks)
    return f"what our observer saw up to then is kept{f', but {missing}' if missing else ''}"


def requested_steps(ranks: Iterable[Facts]) -> str | None:
    """The steps of a window that were asked for, `3-399` or `3 on`; null where ranks differ, or do not say."""
    asked = {str(facts.get("steps_asked")) for facts in ranks}
    match = re.fullmatch(r"(\d{1,18}):(\d{0,18})", asked.pop(), re.ASCII) if len(asked) == 1 else None
    if match is None:
        return None
    if not match[2]:
        return f"{match[1]} on"
    first, last = int(match[1]), int(match[2]) - 1
    return f"{first}-{last}" if first < last else str(first)


def _describe_steps(cut: Sequence[Facts], always: bool) -> str | None:
    """Which steps of those asked for all ranks of `cut` hold; unless `always` only where some are missing."""
    asked = requested_steps(cut)
    if asked is None:
        return None
    held = [facts.get("steps") for facts in cut]
    if any(steps is None for steps in held):
        return f"of steps {asked} not all are recorded"
    whole = format_ranges(sorted(set(held[0] or ()).intersection(*(steps or () for steps in held[1:]))))
    if not always and (whole == asked or asked.endswith(" on")):
        return None
    each = " by each of them" if len(cut) > 1 else ""
    return f"{f'steps {whole} of' if whole else 'no whole step of'} {asked} {'are' if whole else 'is'} recorded{each}"
