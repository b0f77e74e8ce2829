"""What a seal (rank_<r>.json, and killed.json) and run.json say, as far as it is of the types that we write.

They lie in folders that may be a stranger's, of another version, or of a disk that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .facts import PARTS

Facts = dict[str, Any]
Check = Callable[[Any], bool]
MOST_RANKS = 1 << 20
_MOST_LEVELS = 32


def _whole(least: int, beyond: int) -> Check:
    """A whole number in [least, beyond), which true is not."""
    return lambda value: type(value) is int and least <= value < beyond


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _each(kind: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("pg_name"), str)
        and isinstance(value.get("ranks"), list)
    )


def _is_cut(value: Any) -> bool:
    """Kinds of parallelism and their sizes."""
    return isinstance(value, dict) and all(
        name in PARTS and _rank_count(size) for name, size in value.items()
    )


def _is_ring(value: Any) -> bool:
    names = ("overwritten_operators", "whole_since_ns")
    return isinstance(value, dict) and all(_count(value.get(name)) for name in names)


_text, _dict = _is(str), _is(dict)
_count = _whole(0, 1 << 63)  # times too: until 2262
_rank_count = _whole(1, MOST_RANKS + 1)
_NEEDED: dict[str, Check] = {
    "rank": _whole(0, MOST_RANKS),
    "world_size": _rank_count,
    "host": _text,
    "start_ns": _count,
}
_SEAL: dict[str, Check] = {
    "end_ns": _count,
    "pid": _count,
    "restart": _count,
    "local_world_size": _rank_count,
    "backend": _text,
    "device_name": _text,
    "groups": _each(_is_group),
    "environment": _dict,
    "versions": _dict,
    "operators": _count,
    "steps": _each(_count),
    "steps_asked": _text,
    "sources": _each(_text),
    "files": _each(_text),
    "warnings": _each(_text),
    "ring": _is_ring,
    "job": _dict,
    "ended": _dict,
    "model": _dict,
}
_INSIDE: dict[str, dict[str, Check]] = {
    "job": dict.fromkeys(("batch", "rendezvous", "launch"), _text) | {"supervised": _is(bool)},
    "ended": {"how": _text, "error": _text, "in_window": _is(bool)},
    "model": {
        "parameters": _count,
        "embedding_parameters": _count,
        "batch_of_rank": _count,
        "class": _text,
        "dtype": _text,
        "parallel": _is_cut,
    },
}
_RUN: dict[str, Check] = {"command": _each(_text), "host": _text, "returncode": _whole(-(1 << 31), 1 << 32)}


def shallow(value: Any) -> bool:
    """Whether lists and mappings are nested no deeper than what we write; deeper ones may not be written again."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        containers = [one for one in level if isinstance(one, (dict, list))]
        if not containers:
            return True
        level = [part for one in containers for part in (one.values() if isinstance(one, dict) else one)]
    return False


def checked(facts: Facts | None, rank: int | None = None) -> Facts | None:
    """The facts of a seal without what is of another type than we write; null stays, as unknown.

    None where it does not say of which rank, world, host and time it is, or of another `rank` than its name does.
    """
    if facts is None or not all(check(facts.get(name)) for name, check in _NEEDED.items()):
        return None
    if rank is not None and facts["rank"] != rank:
        return None
    facts = _known(facts, _SEAL)
    return {
        name: value if value is None or name not in _INSIDE else _known(value, _INSIDE[name])
        for name, value in facts.items()
    }


def checked_run(facts: Facts | None) -> Facts:
    """What a run.json says of the command; empty where there is none."""
    return {} if facts is None else _known(facts, _RUN)


def _known(facts: Facts, types: dict[str, Check]) -> Facts:
    return {
        name: value
        for name, value in facts.items()
        if value is None or name not in types or types[name](value)
    }
