"""The first source lines of the user's functions that Python stacks name, for reports: the code may change later."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from pathlib import Path

FRAMES = re.compile(rb'"name": "([^"\\]{1,400}\(\d{1,7}\): [^"\\]{1,200})"')
"""Names of Python calls in a Kineto trace, as file(line): function."""
_FRAME = re.compile(r"(.*)\((\d+)\): .*")
_LIBRARY = re.compile(r"(?:^|/)(?:site-packages|dist-packages|torch|etloom)/|/lib/python\d|^<")
MAX_FRAMES, MAX_LINES, MAX_LENGTH = 500, 12, 200
"""Functions, lines of each and letters of each line that are kept."""


def read_source_lines(frames: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return for each frame of the user's own code its file, and the lines from that of the frame on.

    Files are by_frame as Python finds them, since torch leaves out the folder of sys.path in which they are.
    """
    by_frame: dict[str, dict[str, object]] = {}
    for frame in sorted(frames):
        match = _FRAME.fullmatch(frame)
        if match is None or not int(match[2]) or _LIBRARY.search(match[1]):
            continue
        lines = linecache.getlines(match[1])[int(match[2]) - 1 :][:MAX_LINES]
        entry = linecache.cache.get(match[1], ())
        path = str(entry[3]) if len(entry) > 3 else match[1]
        if lines and not _LIBRARY.search(path):
            by_frame[frame] = {
                "file": str(Path(path).resolve()),
                "lines": [line.rstrip()[:MAX_LENGTH] for line in lines],
            }
        if len(by_frame) == MAX_FRAMES:
            break
    return by_frame
