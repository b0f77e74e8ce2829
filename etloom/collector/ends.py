"""How the processes of a run ended, as far as anybody saw it.

`ended` of rank_<r>.json says how: {"how": "in order"}, "raised" with the class of the exception as `error`, or
"killed", which os._exit looks like from outside; `in_window`: before the window was written. Null where nobody looked:
the launcher was killed too, or there was none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .words import runs

Facts = dict[str, Any]
STARTED = "started"
"""An empty file in the folder of a window that was not only prepared."""
NOTE = "killed.json"
"""What a window leaves beside its unfinished files, for the case that its process is killed: its facts as far as they
are known, and as `window` and `command` its folder in that of the run and what runs."""
IN_WINDOW = {"how": "killed", "in_window": True, "error": None}


def of_process(seen: Facts) -> Facts:
    """How a process ended whose window is written, by what it left for the launcher (seen.Seen)."""
    error = seen.get("raised")
    how = "killed" if not seen.get("ended") else "raised" if error else "in order"
    return {"how": how, "in_window": False, "error": error}


def told(ranks: Iterable[Facts]) -> str | None:
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
            words = f"{'was' if one else 'were'} killed {when}, or left by os._exit"
        else:
            words = f"ended by {what}"  # of a file: no format
        said.append(f"{'rank' if one else 'ranks'} {runs(sorted(numbers))} {words}")
    return "; ".join(said) or None
