"""Validates rank_<r>.json, killed.json and run.json: drops fields whose type is not what the collector writes.

The files may come from other people, from another version, or from a failing disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .workload_card import PARALLELISM_NAMES

Facts = dict[str, Any]
Check = Callable[[Any], bool]
MAX_RANKS = 1 << 20
_MAX_DEPTH = 32


def _integer_between(minimum: int, limit: int) -> Check:
    """Return a function that checks whether a value is an integer, not a boolean, in [minimum, limit)."""
    return lambda value: type(value) is int and minimum <= value < limit


def _type_check(cls: type) -> Check:
    return lambda value: isinstance(value, cls)


def _list_check(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("pg_name"), str)
        and isinstance(value.get("ranks"), list)
    )


def _is_parallelism(value: Any) -> bool:
    """Return whether a value is a mapping from kinds of parallelism to their numbers of ranks."""
    return isinstance(value, dict) and all(
        name in PARALLELISM_NAMES and _is_rank_count(size) for name, size in value.items()
    )


def _is_ring(value: Any) -> bool:
    names = ("overwritten_operators", "whole_since_ns")
    return isinstance(value, dict) and all(_is_count(value.get(name)) for name in names)


def _is_unrecorded(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_count(value.get(name)) for name in ("step_ns", "steps"))


def _are_source_lines(value: Any) -> bool:
    """Return whether a value has for each frame its file and lines."""
    return isinstance(value, dict) and all(
        isinstance(entry, dict) and _is_text(entry.get("file")) and _list_check(_is_text)(entry.get("lines"))
        for entry in value.values()
    )


_is_text, _is_dict = _type_check(str), _type_check(dict)
_is_count = _integer_between(0, 1 << 63)  # also for times: until 2262
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
    "groups": _list_check(_is_group),
    "environment": _is_dict,
    "versions": _is_dict,
    "operators": _is_count,
    "steps": _list_check(_is_count),
    "steps_asked": _is_text,
    "sources": _list_check(_is_text),
    "files": _list_check(_is_text),
    "warnings": _list_check(_is_text),
    "ring": _is_ring,
    "job": _is_dict,
    "ended": _is_dict,
    "model": _is_dict,
    "unrecorded": _is_unrecorded,
    "source_lines": _are_source_lines,
}
_NESTED_FIELDS: dict[str, dict[str, Check]] = {
    "job": dict.fromkeys(("batch", "rendezvous", "launch"), _is_text) | {"supervised": _type_check(bool)},
    "ended": {"how": _is_text, "error": _is_text, "in_window": _type_check(bool)},
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
    "command": _list_check(_is_text),
    "host": _is_text,
    "returncode": _integer_between(-(1 << 31), 1 << 32),
    "ended": _is_text,
    "world_size": _is_rank_count,
    "ranks": _type_check(list),
}


def is_shallow(value: Any) -> bool:
    """Return whether lists and mappings are nested less than 32 levels deep; deeper values may fail to be written."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return True
        level = [
            child
            for container in containers
            for child in (container.values() if isinstance(container, dict) else container)
        ]
    return False


def validate_rank_facts(facts: Facts | None, rank: int | None = None) -> Facts | None:
    """Return the record of a rank (rank_<r>.json) without fields of a wrong type; null, which means unknown, is valid.

    Returns None if rank, world size, host or start is missing, or if `rank` (of the file name) is another one.
    """
    if facts is None or not all(check(facts.get(name)) for name, check in _REQUIRED_FIELDS.items()):
        return None
    if rank is not None and facts["rank"] != rank:
        return None
    valid = _drop_invalid(facts, _RANK_FIELDS)
    for name, checks in _NESTED_FIELDS.items():
        if valid.get(name) is not None:
            valid[name] = _drop_invalid(valid[name], checks)
    return valid


def validate_run_facts(facts: Facts | None) -> Facts:
    """Return the contents of a run.json without fields of a wrong type; empty if there is no run.json."""
    return {} if facts is None else _drop_invalid(facts, _RUN_FIELDS)


def _drop_invalid(facts: Facts, checks: dict[str, Check]) -> Facts:
    return {
        name: value
        for name, value in facts.items()
        if value is None or name not in checks or checks[name](value)
    }
