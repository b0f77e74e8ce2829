"""Checks and repairs JSON text: one row (node or event) of a damaged trace, or the members of its document."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

_NAME = re.compile(r'"name"\s*:\s*"')
_NAME_ENDS = re.compile(r'"\s*,\s*"(?:ctrl_deps|parent|id|rf_id|ph|cat|pid|tid|ts|dur|args)"\s*:')
_MAX_NAME_ENDS = 16
"""The number of possible ends of an unescaped name that are tried: each requires a scan of the whole row."""
# An unterminated string extends to the end of the text and is not searched again.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|-?\b(?:nan|inf|NaN|Infinity)\b', re.DOTALL)
_MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*"\s*:\s*)')
_INVALID_CHARACTER = re.compile(r"[\x00-\x1f]|\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})|\\")


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def is_valid(text: str | bytes) -> bool:
    """Return whether the text is one JSON value other than null."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return _JSON.decode(text) is not None
    except (ValueError, RecursionError):
        return False


def is_valid_tail(text: str) -> bool:
    """Return whether the text after the last row, such as ``], "finish_ts": 1}``, ends a JSON document validly."""
    return text == "]" or is_valid('{"rows": [' + text)


def find_row_end(text: str) -> int:
    """Return the position after the JSON object at the beginning of the text, or 0 if there is none."""
    start = len(text) - len(text.lstrip(" \t\r\n,"))
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0
    return end if isinstance(value, dict) and value else 0


def repair_row(text: str) -> tuple[str, int, str]:
    """Repair the JSON text of one row: escape its name, control characters and backslashes, quote nan and inf.

    Returns:
        The repaired text, the position after the row in it (0: not repairable), and a description of the repair.
    """
    text = text.lstrip(" \t\r\n,")
    if end := find_row_end(text):
        return text, end, "invalid UTF-8 bytes, replaced"
    escaped = _escape_invalid_tokens(text)
    if end := find_row_end(escaped):
        return escaped, end, "unescaped control character or backslash, nan or inf; escaped"
    if name := _NAME.search(text):
        for ends in islice(_NAME_ENDS.finditer(text, name.end()), _MAX_NAME_ENDS):
            quoted = json.dumps(text[name.end() : ends.start()], ensure_ascii=False)
            named = text[: name.end() - 1] + quoted + text[ends.start() + 1 :]
            for attempt in (named, _escape_invalid_tokens(named)):
                if end := find_row_end(attempt):
                    return attempt, end, "unescaped name"
    return text, 0, ""


def _escape_invalid_tokens(text: str) -> str:
    """Return JSON text with raw control characters and invalid backslashes escaped, and nan and inf quoted."""

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return f"\\u{ord(character):04x}" if character < " " else "\\\\" if character == "\\" else character

    def escape_token(match: re.Match[str]) -> str:
        return _INVALID_CHARACTER.sub(escape, match[0]) if match[0][0] == '"' else f'"{match[0]}"'

    return _TOKEN.sub(escape_token, text)


def split_members(text: str) -> tuple[list[str], str]:
    """Split the text of a JSON object into the texts of its members, up to the first damaged member.

    Args:
        text: The object without its first brace.

    Returns:
        The text of each member up to the first that is damaged, and the text from that one on.
    """
    members: list[str] = []
    at = 0
    while match := _MEMBER.match(text, at):
        try:
            _, end = _JSON.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return members, text[at:]
        members.append(text[match.start(1) : end])
        at = end
    return members, ""
