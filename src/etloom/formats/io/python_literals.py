"""Parses the repr of plain Python values by converting it to JSON; no code is evaluated.

Chakra's converter writes str(list): [[4, 5, 0, 64, 4, 'cuda:0'], True, None].
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\b(?:True|False|None|nan|inf)\b|[()]", re.DOTALL)
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "nan": '"nan"',
    "inf": '"inf"',
    "(": "[",
    ")": "]",
}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


@lru_cache(maxsize=1 << 14)
def parse_cached_literal(text: str) -> Any:
    """Return the cached result of `parse_literal`, for texts that repeat; callers must not modify the shared value."""
    return parse_literal(text)


def parse_literal(text: str) -> Any:
    """Parse the repr of lists, tuples, numbers, strings, booleans and None; tuples become lists.

    Raises:
        ValueError: For anything else.
    """
    if not text:
        return []
    as_json = _TOKEN.sub(
        lambda match: _WORDS.get(match[0]) or _convert_string(match[0]), text.replace(",)", ")")
    )
    try:
        return json.loads(as_json.replace('-"inf"', '"-inf"'))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _convert_string(token: str) -> str:
    body = token[1:-1]
    if "\\" in body:
        body = _ESCAPE.sub(_unescape, body)
    return json.dumps(body)


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        point = int(code[1:], 16)
        return chr(point) if point <= 0x10FFFF else "\ufffd"
    return _ESCAPED.get(code, code)
