"""Reads the facts about a rank's process that `etloom collect --watch` adds to the rank's Flight Recorder dump."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_MAX_INTERVAL_S = 1e6


def read_process_facts(process: Any) -> tuple[dict[str, Any], int]:
    """Return the process facts in a dump that have the expected type, and the number of facts of another type.

    Args:
        process: the member ``process`` of a dump.
    """
    if not isinstance(process, dict):
        return {}, 0 if process is None else 1
    stated = {name: value for name, value in process.items() if name in _CHECKS and value is not None}
    facts = {name: value for name, value in stated.items() if _CHECKS[name](value)}
    return facts, len(stated) - len(facts)


def _is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_interval(value: Any) -> bool:
    is_number = type(value) in (int, float)
    return is_number and math.isfinite(value) and 0 <= value <= _MAX_INTERVAL_S


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "pid": _is_integer,
    "host": _is_text,
    "written_ns": _is_integer,
    "interval_s": _is_interval,
    "world_size": _is_integer,
    "steps": _is_integer,
    "step_ends_ns": _is_list_of(_is_integer),
    "frames": _is_list_of(_is_text),
    "addresses": _is_list_of(_is_text),
    "unacknowledged": _is_list_of(_is_text),
    "finished": lambda value: isinstance(value, bool),
    "error": _is_text,
}
