"""The source lines that `etloom collect` kept, next to the findings whose Python frame they are of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import NamedTuple
from urllib.parse import quote

from etloom.core.trace import Job

_FRAME = re.compile(r".*\((\d{1,7})\): .*", re.DOTALL)
MAX_LINES, MAX_LENGTH = 12, 200


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
                sources.setdefault(frame, SourceLines(file, int(match[1]), shown))
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
