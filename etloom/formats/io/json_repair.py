"""The text of one row, or of the members of a document: whether it is JSON, and if not, made so."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

_NAME = re.compile(r'"name"\s*:\s*"')
_NAME_ENDS = re.compile(r'"\s*,\s*"(?:ctrl_deps|parent|id|rf_id|ph|cat|pid|tid|ts|dur|args)"\s*:')
_MOST_ENDS = 16
"""Places where a raw name may end that are tried: each costs a look at the whole row."""
# A string that does not end goes on to the end of the text, and is not looked for again within.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|-?\b(?:nan|inf|NaN|Infinity)\b', re.DOTALL)
_MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*"\s*:\s*)')
_ODD = re.compile(r"[\x00-\x1f]|\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})|\\")


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def is_valid(text: str | bytes) -> bool:
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return _JSON.decode(text) is not None
    except (ValueError, RecursionError):
        return False


def is_valid_tail(text: str) -> bool:
    return text == "]" or is_valid('{"rows": [' + text)


def find_row_end(text: str) -> int:
    """Where the JSON object ends that the text begins with; 0 where it begins with none."""
    start = len(text) - len(text.lstrip(" \t\r\n,"))
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0
    return end if isinstance(value, dict) and value else 0


def repair_row(text: str) -> tuple[str, int, str]:
    """The text as a row, where the row ends in it (0: it is none), and what was done."""
    text = text.lstrip(" \t\r\n,")
    if end := find_row_end(text):
        return text, end, "bytes that are no UTF-8, replaced"
    tidy = _escape_invalid_tokens(text)
    if end := find_row_end(tidy):
        return tidy, end, "a control character, backslash, nan or inf, spelt out"
    if name := _NAME.search(text):
        for ends in islice(_NAME_ENDS.finditer(text, name.end()), _MOST_ENDS):
            quoted = json.dumps(text[name.end() : ends.start()], ensure_ascii=False)
            named = text[: name.end() - 1] + quoted + text[ends.start() + 1 :]
            for attempt in (named, _escape_invalid_tokens(named)):
                if end := find_row_end(attempt):
                    return attempt, end, "a name that was not escaped"
    return text, 0, ""


def _escape_invalid_tokens(text: str) -> str:
    """Strings without raw control characters and unknown escapes; numbers that JSON has not as strings."""

    def spelt(odd: re.Match[str]) -> str:
        found = odd[0]
        return f"\\u{ord(found):04x}" if found < " " else "\\\\" if found == "\\" else found

    def token(match: re.Match[str]) -> str:
        return _ODD.sub(spelt, match[0]) if match[0][0] == '"' else f'"{match[0]}"'

    return _TOKEN.sub(token, text)


def split_members(text: str) -> tuple[list[str], str]:
    """The members of an object that can be read, as they stand, and the text from the first that cannot.

    ``text`` is without the first brace.
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
