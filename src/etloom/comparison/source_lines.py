"""Source lines that `etloom collect` kept, and the Python functions whose lines changed between two runs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import NamedTuple

from etloom.core.trace import Job

_FRAME = re.compile(r"(.*)\((\d{1,7})\): (.*)", re.DOTALL)
MAX_LINES, MAX_LENGTH = 12, 200
MAX_NAMED, MAX_QUOTED = 3, 60
"""Functions that a sentence names, and characters of each line that it quotes."""


class SourceLines(NamedTuple):
    """The first lines of a Python function: its file, the number of the first line, and the lines."""

    file: str
    first: int
    lines: tuple[str, ...]


class ChangedFunction(NamedTuple):
    """A function whose source lines differ between two runs.

    Attributes:
        name: Of the function.
        file: Its file in the second run.
        first: The number of its first line there.
        changes: Lines of a unified diff without its header.
    """

    name: str
    file: str
    first: int
    changes: tuple[str, ...]


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


def find_changed_functions(before: Job, after: Job) -> list[ChangedFunction]:
    """Return the functions whose lines, as `etloom collect` kept them, differ between two runs, by file and name.

    A function is one of the same name in the same file; its place in the file may have moved.
    """
    sides = [_index_functions(find_source_lines(job)) for job in (before, after)]
    functions = []
    for key in sorted(sides[0].keys() & sides[1].keys()):
        bodies, new_bodies = ({source.lines: source for source in side[key]} for side in sides)
        removed, added = (
            list(each.keys() - other.keys()) for each, other in ((bodies, new_bodies), (new_bodies, bodies))
        )
        if len(bodies) != len(new_bodies) or len(removed) != 1:
            continue  # equal, or several functions of this name: it is unknown which one became which
        source = new_bodies[added[0]]
        changes = tuple(difflib.unified_diff(removed[0], added[0], lineterm="", n=1))[3:]
        functions.append(ChangedFunction(key[1], source.file, source.first, changes))
    return functions


def describe_changed_functions(functions: list[ChangedFunction]) -> str | None:
    """Return a sentence that names changed functions, each with its first changed line; None without any."""
    if not functions:
        return None
    texts = [
        f"{function.name} ({function.file}:{function.first}: {_quote_change(function.changes)})"
        for function in functions[:MAX_NAMED]
    ]
    more = f" and {len(functions) - MAX_NAMED} more" if len(functions) > MAX_NAMED else ""
    return f"source lines changed in {', '.join(texts)}{more}"


def _quote_change(changes: tuple[str, ...]) -> str:
    firsts = (next((line for line in changes if line.startswith(sign)), None) for sign in "-+")
    return ", ".join(
        f"{line[0]} {line[1:].strip()[:MAX_QUOTED]}" for line in firsts if line and line[1:].strip()
    )


def _index_functions(sources: Mapping[str, SourceLines]) -> dict[tuple[str, str], list[SourceLines]]:
    """Return (file, function) -> the lines of each frame of a function of this name."""
    functions: dict[tuple[str, str], list[SourceLines]] = {}
    for frame, source in sources.items():
        match = _FRAME.fullmatch(frame)
        assert match is not None
        functions.setdefault((match[1], match[3]), []).append(source)
    return functions
