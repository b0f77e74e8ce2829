"""What a seal (rank_<r>.json, and killed.json) and run.json say, as far as it is of the types that we write.

They lie in folders that may be a stranger's, of another version, or of a disk that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .session.rank_facts import PARALLELISM_NAMES

Facts = dict[str, Any]
Check = Callable[[Any], bool]
MAX_RANKS = 1 << 20
_MAX_DEPTH = 32


def _integer_between(least: int, beyond: int) -> Check:
    """A whole number in [least, beyond), which true is not."""
    return lambda value: type(value) is int and least <= value < beyond


def _instance_of(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _list_of(kind: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("pg_name"), str)
        and isinstance(value.get("ranks"), list)
    )


def _is_parallelism(value: Any) -> bool:
    """Kinds of parallelism and their sizes."""
    return isinstance(value, dict) and all(
        name in PARALLELISM_NAMES and _is_rank_count(size) for name, size in value.items()
    )


def _is_ring(value: Any) -> bool:
    names = ("overwritten_operators", "whole_since_ns")
    return isinstance(value, dict) and all(_is_count(value.get(name)) for name in names)


_is_text, _is_dict = _instance_of(str), _instance_of(dict)
_is_count = _integer_between(0, 1 << 63)  # times too: until 2262
_is_rank_count = _integer_between(1, MAX_RANKS + 1)
_REQUIRED_FIELDS: dict[str, Check] = {
    "rank": _integer_between(0, MAX_RANKS),
    "world_size": _is_rank_count,
    "host": _is_text,
    "start_ns": _is_count,
}
_RANK_FIELDS: dict[str, Check] = {
    "end_ns": _is_count,
    "pid": _is_count,
    "restart": _is_count,
    "local_world_size": _is_rank_count,
    "backend": _is_text,
    "device_name": _is_text,
    "groups": _list_of(_is_group),
    "environment": _is_dict,
    "versions": _is_dict,
    "operators": _is_count,
    "steps": _list_of(_is_count),
    "steps_asked": _is_text,
    "sources": _list_of(_is_text),
    "files": _list_of(_is_text),
    "warnings": _list_of(_is_text),
    "ring": _is_ring,
    "job": _is_dict,
    "ended": _is_dict,
    "model": _is_dict,
}
_NESTED_FIELDS: dict[str, dict[str, Check]] = {
    "job": dict.fromkeys(("batch", "rendezvous", "launch"), _is_text) | {"supervised": _instance_of(bool)},
    "ended": {"how": _is_text, "error": _is_text, "in_window": _instance_of(bool)},
    "model": {
        "parameters": _is_count,
        "embedding_parameters": _is_count,
        "batch_of_rank": _is_count,
        "class": _is_text,
        "dtype": _is_text,
        "parallel": _is_parallelism,
    },
}
_RUN_FIELDS: dict[str, Check] = {
    "command": _list_of(_is_text),
    "host": _is_text,
    "returncode": _integer_between(-(1 << 31), 1 << 32),
}


def is_shallow(value: Any) -> bool:
    """Whether lists and mappings are nested no deeper than what we write; deeper ones may not be written again."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [one for one in level if isinstance(one, (dict, list))]
        if not containers:
            return True
        level = [part for one in containers for part in (one.values() if isinstance(one, dict) else one)]
    return False


def validate_rank_facts(facts: Facts | None, rank: int | None = None) -> Facts | None:
    """The facts of a seal without what is of another type than we write; null stays, as unknown.

    None where it does not say of which rank, world, host and time it is, or of another `rank` than its name does.
    """
    if facts is None or not all(check(facts.get(name)) for name, check in _REQUIRED_FIELDS.items()):
        return None
    if rank is not None and facts["rank"] != rank:
        return None
    facts = _drop_invalid(facts, _RANK_FIELDS)
    return {
        name: value
        if value is None or name not in _NESTED_FIELDS
        else _drop_invalid(value, _NESTED_FIELDS[name])
        for name, value in facts.items()
    }


def validate_run_facts(facts: Facts | None) -> Facts:
    """What a run.json says of the command; empty where there is none."""
    return {} if facts is None else _drop_invalid(facts, _RUN_FIELDS)


def _drop_invalid(facts: Facts, types: dict[str, Check]) -> Facts:
    return {
        name: value
        for name, value in facts.items()
        if value is None or name not in types or types[name](value)
    }
