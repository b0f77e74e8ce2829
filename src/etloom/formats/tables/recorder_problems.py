"""Turns what a recorder says about its own losses into rows of stats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etloom.core.schema import Stat

LOSS_WORDS = r"(?i)\b(?:missing|lost|drop(?:ped|ping|s)|discarded|truncated|overflow\w*|not all)\b"
"""Words of a message that state a loss, whatever its severity."""
_MAX_TEXT = 500
_COUNT = re.compile(r"(?i)(?:dropped|lost|discarded)")
_MESSAGES = ("WARNING", "ERROR")


def state_problems(name: str, messages: Iterable[str]) -> Stat:
    """Return the stat of a recorder's messages about its recording: their number, and their texts."""
    texts = [" ".join(text.split()) for text in messages]
    return Stat(name, "data_loss", len(texts), "; ".join(dict.fromkeys(texts))[:_MAX_TEXT])


def list_header_problems(header: Mapping[str, Any]) -> list[str]:
    """List the losses that a header states: warnings and errors of the profiler, and counts of dropped records."""
    problems: list[str] = []
    for key, value in header.items():
        if key.upper() in _MESSAGES:
            messages = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            problems += [str(message) for message in messages if message]
    return problems + [f"{key}: {count:,}" for key, count in list_losses(header).items()]


def list_losses(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return the entries of an object that count what was dropped, lost or discarded, if that is anything."""
    return {
        key: int(str(value)[:18])
        for key, value in counts.items()
        if _COUNT.search(key) and str(value)[:18].isdecimal() and 0 < int(str(value)[:18]) < 1 << 53
    }
