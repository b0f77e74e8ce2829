"""Renders the source lines that `etloom collect` kept: of the frames of findings, and those that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import quote

from etloom.comparison.source_lines import ChangedFunction, SourceLines

MAX_CHANGED = 50


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


def render_changed_functions(functions: Sequence[ChangedFunction]) -> str:
    """Render functions whose source lines changed, as a list of differences; empty if there are none."""
    items = [
        f"<li><code>{escape(function.name)}</code> in {escape(function.file)}:{function.first}"
        f"<pre>{escape(chr(10).join(function.changes))}</pre></li>"
        for function in functions[:MAX_CHANGED]
    ]
    more = len(functions) - MAX_CHANGED
    note = f'<p class="soft">{more:,} more functions changed.</p>' if more > 0 else ""
    return f'<ul class="source">{"".join(items)}</ul>{note}' if items else ""
