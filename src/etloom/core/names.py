"""Tables of name patterns by which etloom recognizes events (``known_names``); users can extend them with files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - before polars, which otherwise converts arrays half as fast
import polars as pl

from etloom.core.errors import InvalidValue
from etloom.core.known_names import KNOWN_NAMES
from etloom.core.registry import list_entry_points

SECTIONS = ("iterations", "engines", "captures", "families", "communication", "costs")
ENTRY_POINT = "etloom.names"
FAMILIES = (
    "gemm", "attention", "convolution", "normalisation", "softmax", "elementwise", "reduction", "embedding", "copy",
    "quantization", "routing", "pooling", "sorting", "waiting", "moe", "rope", "ssm", "loss", "optimizer",
    "communication", "fused_communication", "other",
)  # fmt: skip
"""Families of kernels. routing: of tokens to experts; moe: mixtures of experts in one operator; rope: rotary positions;
ssm: state-space models and linear attention (Mamba, delta rule); optimizer: fused ones; sorting: also scans and
sampling; waiting: they only wait; fused_communication: kernels that communicate and compute, in unknown shares."""
_POLARS_SECTIONS = ("engines", "families", "communication")
"""Sections whose patterns polars evaluates, for millions of kernels."""
_KEYS = {
    "iterations": {"engine", "pattern", "category", "phase"},
    "engines": {"engine", "pattern"},
    "captures": {"pattern"},
    "families": {"family", "pattern"},
    "communication": {"pattern", "computes"},
    "costs": {
        *("pattern", "family", "model", "read", "write", "update", "result", "flops", "elements"),
        *(
            "a",
            "b",
            "out",
            "sizes",
            "then",
            "whole",
            "hidden",
            "up",
            "down",
            "routing",
            "router",
            "q",
            "k",
            "v",
            "wraps",
        ),
    },
}
_MODELS = {
    "arguments": (),
    "product": ("a", "b"),
    "experts": ("hidden",),
    "attention": ("q", "k", "v"),
}
"""Models of costs -> keys that they need."""
_SEVERAL = ("read", "write", "update", "result", "elements")
"""Keys of costs that may have several positions."""
_PLACES = r"\d{1,3}(?::\d{1,3})?(?: \d{1,3}(?::\d{1,3})?)*"
"""Positions of arguments in a row of ``costs``."""
Row = Mapping[str, Any]

_user_files: dict[Path, tuple[str, dict[str, list[Row]]]] = {}
"""Added file -> its path, size and time of modification; its rows by section."""


def add_names(*files: str | os.PathLike[str]) -> None:
    """Add users' files of name patterns, which precede etloom's in all traces that this process reads afterwards.

    Raises:
        InvalidValue: A file cannot be read, or is not a table of names.
    """
    for file in files:
        path = Path(file)
        tables = read_names(path)
        state = path.stat()
        _user_files[path] = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}", tables
    list_names.cache_clear()


def list_user_files() -> tuple[str, ...]:
    """Return a text for each added file of name patterns: its path, size and modification time."""
    return tuple(state for state, _ in _user_files.values())


def list_user_paths() -> tuple[Path, ...]:
    """Return the paths of the added files of name patterns, so that a child process can add them, too."""
    return tuple(path.resolve() for path in _user_files)


@cache
def list_names(section: str) -> tuple[Row, ...]:
    """Return the compiled name patterns of a section: first users', then installed packages', then etloom's."""
    tables = [*(rows for _, rows in _user_files.values()), *_load_entry_points()]
    rows = [row for table in tables for row in table.get(section, ())]
    return (*rows, *[{**row, "pattern": re.compile(row["pattern"])} for row in KNOWN_NAMES.get(section, ())])


@cache
def _load_entry_points() -> list[dict[str, list[Row]]]:
    """Return the tables of name patterns that installed packages provide, each as rows by section."""
    points = list_entry_points(ENTRY_POINT)
    return [check_names(point.load(), f"entry point {point.name}") for point in points]


def read_names(path: Path) -> dict[str, list[Row]]:
    """Read a YAML file of name patterns, check it, and return its rows by section.

    Raises:
        InvalidValue: It cannot be read, or a row is not as docs/serving.md describes.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidValue(f"cannot read names: {reason}", where=path, option="names") from None
    return check_names(_parse(text, path), path)


def match_name(section: str, name: str) -> re.Match[str] | None:
    """Return the match of the first pattern of a section that matches a name; None if no pattern does."""
    matches = (row["pattern"].search(name) for row in list_names(section))
    return next((match for match in matches if match is not None), None)


def read_number(match: re.Match[str] | None, group: str) -> int | None:
    """Return the integer in a named group of a match; None if there is none or it has more than 15 digits."""
    text = match.groupdict().get(group) if match is not None else None
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else None


def _parse(text: str, where: object) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = "" if line is None else f" at line {line + 1}"
        raise InvalidValue(f"is not YAML{place}", where=str(where), option="names") from None


def _check_cost(row: Row, place: str, error: Callable[[str, str], InvalidValue]) -> None:
    if row.get("model") not in _MODELS:
        raise error(f"{place}: unknown model {row.get('model')!r}", f"expected one of {', '.join(_MODELS)}")
    if missing := [key for key in _MODELS[row["model"]] if key not in row]:
        raise error(
            f"{place} has no {missing[0]}",
            f"the model {row['model']} needs {', '.join(_MODELS[row['model']])}",
        )
    for key in sorted(set(row) - {"pattern", "family", "model"}):
        if not re.fullmatch(_PLACES if key in _SEVERAL else r"\d{1,3}", row[key]):
            several = (
                'expected positions of arguments, such as "0 2"' if key in _SEVERAL else "expected one number"
            )
            raise error(f"{place}: {key} is {row[key]!r}", several)


def check_names(tables: Any, where: object) -> dict[str, list[Row]]:
    """Check the sections of a file of name patterns, and return them with compiled regular expressions.

    Raises:
        InvalidValue: It is not a table of names.
    """

    def error(problem: str, remedy: str) -> InvalidValue:
        return InvalidValue(problem, where=str(where), remedy=remedy, option="names")

    if not isinstance(tables, Mapping):
        raise error("expected sections of names", f"sections are {', '.join(SECTIONS)}")
    checked: dict[str, list[Row]] = {}
    for section, rows in tables.items():
        if section not in SECTIONS:
            raise error(f"unknown section {section!r}", f"expected one of {', '.join(SECTIONS)}")
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
            raise error(f"section {section}: expected a list", "write rows as '- pattern: ...'")
        checked[section] = []
        for i, row in enumerate(rows, 1):
            place = f"row {i} of {section}"
            if not isinstance(row, Mapping) or not isinstance(row.get("pattern"), str):
                raise error(f"{place} has no pattern", "write '- pattern: REGEX'")
            if unknown := sorted(set(map(str, row)) - _KEYS[section]):
                raise error(
                    f"{place}: unknown key {unknown[0]!r}", f"expected {', '.join(sorted(_KEYS[section]))}"
                )
            if not_text := [key for key, value in row.items() if not isinstance(value, str)]:
                raise error(f"{place}: {not_text[0]} is not text", "write it in quotes")
            if section in ("families", "costs") and row.get("family") not in FAMILIES:
                raise error(
                    f"{place}: unknown family {row.get('family')!r}", f"expected one of {', '.join(FAMILIES)}"
                )
            if section == "costs":
                _check_cost(row, place, error)
            try:
                checked[section].append({**row, "pattern": re.compile(row["pattern"])})
                if section in _POLARS_SECTIONS:
                    pl.Series([""]).str.contains(row["pattern"])
            except pl.exceptions.PolarsError:
                problem_text = (
                    f"{place}: {row['pattern']!r} is not valid in Rust's syntax of regular expressions"
                )
                raise error(problem_text, "leave out look-around and back-references") from None
            except re.error as problem:
                raise error(
                    f"{place}: {row['pattern']!r} is not a regular expression: {problem}", "correct it"
                ) from None
    return checked
