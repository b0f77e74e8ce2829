"""Checks the entries of ``meta`` that etloom uses; entries of a wrong type or range are removed and counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from etloom.core.schema import INTEGER_LIMIT, Stat
from etloom.formats.io.json_text import replace_surrogates

_MAX_RANKS = 1 << 20
"""The largest world size; no real job has as many ranks."""


def check_meta(meta: Mapping[str, Any], stats: list[Stat]) -> dict[str, Any]:
    """Return ``meta`` without invalid entries and with JSON values only; removed entries are counted in ``stats``."""
    invalid: list[str] = []
    checked = {
        key: value if key in _EXEMPT else _clean(value)
        for key, value in _select_valid(meta, _ENTRIES, "", invalid).items()
    }
    if invalid:
        stats.append(
            Stat(
                "read.invalid_meta", "data_loss", len(invalid), f"{invalid[0]} is not a valid value: left out"
            )
        )
    return checked


def _select_valid(
    entries: Mapping[str, Any], kinds: Mapping[str, _Kind], where: str, invalid: list[str]
) -> dict[str, Any]:
    """Return the entries that pass the check declared for their key, are None, or have no declared check.

    Lists and objects that are None are left out.
    """
    valid: dict[str, Any] = {}
    for key, value in entries.items():
        kind = kinds.get(key)
        if kind is None or (value is None and kind not in _COLLECTIONS and callable(kind)):
            valid[key] = value
        elif value is None:
            continue  # as if it were absent, so that it need not be expected where one iterates
        elif isinstance(kind, dict):
            if isinstance(value, Mapping):
                valid[key] = _select_valid(value, kind, f"{where}{key}.", invalid)
            else:
                invalid.append(_describe(where, key, value))
        elif isinstance(kind, list):
            items = value if isinstance(value, list) else [value]
            accepted = [item for item in items if isinstance(item, Mapping)]
            invalid += [_describe(where, key, item) for item in items if not isinstance(item, Mapping)]
            valid[key] = [_select_valid(item, kind[0], f"{where}{key}.", invalid) for item in accepted]
        elif kind(value):
            valid[key] = value
        else:
            invalid.append(_describe(where, key, value))
    return valid


def _describe(where: str, key: str, value: Any) -> str:
    return f"{where}{key} {str(value)[:60]!r}"


def _clean(value: Any) -> Any:
    """Return a value that JSON can represent: lone surrogates become U+FFFD, NaN and infinity become text."""
    return _replace_nonfinite(replace_surrogates(value))


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_nonfinite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < INTEGER_LIMIT


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < INTEGER_LIMIT


def is_rank(value: Any) -> bool:
    """Return whether a value is a valid rank: an integer from 0 to 2^31 - 1."""
    return type(value) is int and 0 <= value < 1 << 31


def _is_world_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_RANKS


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (type(value) is float and math.isfinite(value))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _is_text_by_name(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())


def _is_clock(value: Any) -> bool:
    return value in ("epoch", "relative")


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _is_version(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


_Kind = Callable[[Any], bool] | dict[str, Any] | list[dict[str, Any]]
"""A predicate; the kinds of the entries of an object; or, in a list, those of the objects of a list."""

_COLLECTIONS = (_is_texts, _is_text_by_name)
_GROUP: dict[str, _Kind] = {"pg_name": _is_name, "pg_desc": _is_text, "backend_config": _is_text}
_DEVICE: dict[str, _Kind] = {
    "name": _is_text,
    **dict.fromkeys(("id", "totalGlobalMem", "computeMajor", "computeMinor", "numSms"), _is_natural),
}
_LINK_COUNTS = ("ties", "iterations", "iteration", "host_operators", "linked", "device_work", "launched")
_LINK: dict[str, _Kind] = {
    "how": _is_text,
    "score": _is_number,
    "coverage": _is_number,
    **dict.fromkeys(_LINK_COUNTS, _is_natural),
}
_ENTRIES: dict[str, _Kind] = {
    "clock": _is_clock,
    "files": _is_texts,
    "formats": _is_texts,
    "path": _is_text,
    "card": {},
    "processes": _is_text_by_name,
    "run": {},
    "stage": _is_natural,
    "data_parallel_rank": _is_natural,
    "linked": _is_flag,
    "link": _LINK,
    "step_name": _is_text,
    "rank": is_rank,
    "world_size": _is_world_size,
    "base_ns": _is_integer,
    "host": _is_text,
    "pid": _is_integer,
    "schema_version": _is_version,
    "kineto_schema_version": _is_version,
    "device_properties": [_DEVICE],
    "distributed": {
        "backend": _is_text,
        "rank": is_rank,
        "world_size": _is_world_size,
        "pg_config": [_GROUP],
    },
    "header": {"execution_trace": {}},
}
_EXEMPT = {"files", "formats"}
"""Entries that name files, whose bytes need not be characters."""
