"""What is said of a run in a line: the tiles of the page, the lines of the terminal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SummaryLine:
    """``figure`` is the number that matters, ``text`` what it is of; tone is "plain", "warn" or "bad"."""

    topic: str
    figure: str
    text: str
    tone: str = "plain"
