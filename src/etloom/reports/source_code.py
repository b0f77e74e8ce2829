"""Source lines that `etloom collect` kept: of the frames of findings, and those that changed between runs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from html import escape
from typing import NamedTuple
from urllib.parse import quote

from etloom.core.trace import Job

_FRAME = re.compile(r"(.*)\((\d{1,7})\): (.*)", re.DOTALL)
MAX_LINES, MAX_LENGTH, MAX_CHANGED = 12, 200, 50


class SourceLines(NamedTuple):
    """The first lines of a Python function: its file, the number of the first line, and the lines."""

    file: str
    first: int
    lines: tuple[str, ...]


def find_source_lines(job: Job) -> dict[str, SourceLines]:
    """Return Python frame -> its source lines, from the run.json of the job; frames of the first rank come first.

    They are what the recording states: no file is opened.
    """
    run = job.meta.get("run") or {}
    ranks = run.get("ranks")
    sources: dict[str, SourceLines] = {}
    for facts in ranks if isinstance(ranks, list) else ():
        entries = facts.get("source_lines") if isinstance(facts, dict) else None
        for frame, entry in entries.items() if isinstance(entries, dict) else ():
            match = _FRAME.fullmatch(frame)
            if match is None or not isinstance(entry, dict):
                continue
            file, lines = entry.get("file"), entry.get("lines")
            if (
                isinstance(file, str)
                and isinstance(lines, list)
                and all(isinstance(line, str) for line in lines)
            ):
                shown = tuple(line[:MAX_LENGTH] for line in lines[:MAX_LINES])
                sources.setdefault(frame, SourceLines(file, int(match[2]), shown))
    return sources


def render_source_lines(frame: str | None, sources: Mapping[str, SourceLines]) -> str:
    """Render the lines of a frame, with a link that opens them in an editor; empty if they were not recorded."""
    if frame is None or (source := sources.get(frame)) is None:
        return ""
    numbered = "\n".join(f"{source.first + at:>5}  {line}" for at, line in enumerate(source.lines))
    link = ""
    if source.file.startswith("/"):
        address = escape(f"vscode://file{quote(source.file)}:{source.first}")
        link = f' <a href="{address}">open in the editor</a>'
    return (
        f'<details class="source"><summary>source of {escape(frame)}</summary>'
        f'<p class="soft">{escape(source.file)}:{source.first}{link}</p><pre>{escape(numbered)}</pre></details>'
    )


def render_changed_lines(before: Job, after: Job) -> str:
    """Render the functions whose kept lines differ between two runs, as a list of differences; empty if there are none.

    A function is one of the same name in the same file; its place in the file may have moved.
    """
    sides = [_index_functions(find_source_lines(job)) for job in (before, after)]
    items = []
    for key in sorted(sides[0].keys() & sides[1].keys()):
        bodies, new_bodies = ({source.lines: source for source in side[key]} for side in sides)
        removed, added = (
            list(each.keys() - other.keys()) for each, other in ((bodies, new_bodies), (new_bodies, bodies))
        )
        if len(bodies) != len(new_bodies) or len(removed) != 1:
            continue  # equal, or several functions of this name, of which it is unknown which became which
        source = new_bodies[added[0]]
        changes = list(difflib.unified_diff(removed[0], added[0], lineterm="", n=1))[3:]
        items.append(
            f"<li><code>{escape(key[1])}</code> in {escape(source.file)}:{source.first}"
            f"<pre>{escape(chr(10).join(changes))}</pre></li>"
        )
    more = len(items) - MAX_CHANGED
    note = f'<p class="soft">{more:,} more functions changed.</p>' if more > 0 else ""
    return f'<ul class="source">{"".join(items[:MAX_CHANGED])}</ul>{note}' if items else ""


def _index_functions(sources: Mapping[str, SourceLines]) -> dict[tuple[str, str], list[SourceLines]]:
    """Return (file, function) -> the lines of each frame of a function of this name."""
    functions: dict[tuple[str, str], list[SourceLines]] = {}
    for frame, source in sources.items():
        match = _FRAME.fullmatch(frame)
        assert match is not None
        functions.setdefault((match[1], match[3]), []).append(source)
    return functions
