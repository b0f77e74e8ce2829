"""Reads YAML files that users write, and checks their keys and values; each error is one line that names the key."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from etloom.core.errors import EtloomError

MAX_COUNT = 1_000_000
_MAX_FILE_BYTES = 1 << 20
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxother = 2, 60


def read_yaml(path: Path, kind: str, remedy: str | None = None) -> Any:
    """Return the content of a YAML file.

    Args:
        path: the file.
        kind: of the content, for messages (topology).
        remedy: if the file cannot be read.

    Raises:
        EtloomError: the file cannot be read, is too large, is not YAML, or has a key twice.
    """
    import yaml

    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise EtloomError(f"{path}: larger than {_MAX_FILE_BYTES:,} bytes, too large for a {kind}")
        text = path.read_text(encoding="utf-8")
        if repeated := _find_repeated_key(yaml.compose(text, yaml.SafeLoader)):
            raise EtloomError(f"{path}: line {repeated[1]}: key {show_value(repeated[0])} is there twice")
        return yaml.safe_load(text)
    except OSError as error:
        raise EtloomError(f"{path}: {error.strerror}", remedy=remedy) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        detail = " ".join(str(error).split())[:200]
        raise EtloomError(f"{path}: not a YAML file: {detail}") from None


def _find_repeated_key(root: Any) -> tuple[str, int] | None:
    """Return a key that a mapping of a YAML document has twice, and the line of the second one; None without any."""
    nodes, visited = [root], set()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in visited:
            continue
        visited.add(id(node))
        if node.id == "sequence":
            nodes += node.value
        elif node.id == "mapping":
            keys = set()
            for key, value in node.value:
                if key.id == "scalar" and key.value in keys:
                    return key.value, key.start_mark.line + 1
                keys.add(key.value if key.id == "scalar" else id(key))
                nodes += [key, value]
    return None


def check_keys(entry: Any, keys: Collection[str], path: str, required: Collection[str] = ()) -> None:
    """Raise EtloomError if an entry is not a mapping of some of ``keys``, or lacks one that is ``required``."""
    if not isinstance(entry, dict):
        raise EtloomError(f"{path}: expected keys and values, got {show_value(entry)}")
    for key in entry:
        if key not in keys:
            raise EtloomError(f"{path}: unknown key {show_value(key)}; expected {', '.join(sorted(keys))}")
    for key in required:
        if key not in entry:
            raise EtloomError(f"{path}: {key} is missing")


def parse_count(value: Any, path: str, most: int = MAX_COUNT, least: int = 1) -> int:
    """Return a whole number between ``least`` and ``most``. Raises EtloomError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise EtloomError(
            f"{path}: expected a whole number from {least} to {most:,}, got {show_value(value)}"
        )
    return value


def parse_positive(value: Any, path: str, most: float) -> float:
    """Return a number above 0 and up to ``most``. Raises EtloomError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise EtloomError(f"{path}: expected a number above 0 and up to {most:g}, got {show_value(value)}")
    return float(value)


def parse_text(value: Any) -> str:
    """Return a value as text: a string as it is, another value as `show_value` does."""
    return value if isinstance(value, str) else show_value(value)


def show_value(value: Any) -> str:
    """Return a value as text of at most 60 characters."""
    try:
        text = re.sub(r"\s+", " ", _REPR.repr(value))
    except ValueError:  # Python refuses to print numbers of more than 4,300 digits
        return "a number of too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
