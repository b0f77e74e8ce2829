"""Reads Python values without running code: literals, and pickles, of which one that names a class is refused.

There are two barriers. First the opcodes are scanned: only those that build lists, dicts, tuples, numbers, strings,
bytes, booleans and None are accepted, so a file that names a class or a function is refused before anything runs.
The unpickler that runs next refuses every class as well.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from functools import lru_cache
from typing import Any, NoReturn

from etloom.core.errors import LimitError, ReadError

_ALLOWED = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE"),
        *("PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "LONG"),
        *("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_DICT", "SETITEM", "SETITEMS", "DICT"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    )
)
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT")
_REMEDY = "dump as JSON: torch._C._distributed_c10d._dump_fr_trace_json()"
_MAX_DIGITS = 4000
_TEXT_UNIT = 64


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is refused")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("a persistent id is refused")


def load_plain_values(data: bytes, path: object, max_values: int = 10_000_000) -> Any:
    """Load a pickle that contains only lists, dicts, tuples, numbers, strings, bytes, booleans and None.

    Args:
        data: The pickle.
        path: The file, for messages.
        max_values: The largest accepted number of parts of the value, written out in full (shared parts count as often
            as they occur).

    Raises:
        ReadError: For any other opcode and for a damaged pickle.
        LimitError: If the value has more than ``max_values`` parts.
    """
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name not in _ALLOWED:
                raise ReadError(
                    f"is a pickle with more than plain values: {opcode.name} at byte {position}",
                    where=str(path),
                    remedy=_REMEDY,
                )
            # The memo is an array as long as its highest index: a few bytes could allocate all memory.
            if opcode.name in _MEMO and isinstance(argument, int) and argument > len(data):
                raise ReadError(f"is a damaged pickle: memo {argument} at byte {position}", where=str(path))
            if isinstance(argument, str) and not argument.isascii():
                argument.encode()  # raises UnicodeError for a lone surrogate, which is not a character
            if isinstance(argument, int) and argument.bit_length() > 4 * _MAX_DIGITS:
                raise LimitError(f"contains an integer of more than {_MAX_DIGITS} digits", where=str(path))
        value = _Unpickler(io.BytesIO(data)).load()
    except (ReadError, LimitError):
        raise
    # The exceptions of a damaged pickle are not documented: pickle's own error and those of the values it builds.
    except (pickle.UnpicklingError, ValueError, EOFError, TypeError, IndexError, KeyError) as error:
        raise ReadError(f"is a damaged pickle: {error}", where=str(path)) from None
    except (AttributeError, UnicodeError, OverflowError, MemoryError, RecursionError) as error:
        raise ReadError(f"is a damaged pickle: {error}", where=str(path)) from None
    _check_value_count(value, path, max_values)
    return value


def _check_value_count(value: Any, path: object, limit: int) -> None:
    parts, pending = 0, [value]
    while pending:
        item = pending.pop()
        parts += 1
        if isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif isinstance(item, (str, bytes)):
            parts += len(item) // _TEXT_UNIT
        if parts + len(pending) > limit:
            raise LimitError(f"contains more than {limit:,} values", where=str(path))


# Parses the repr of plain Python values by converting it to JSON; no code is evaluated.
#
# Chakra's converter writes str(list): [[4, 5, 0, 64, 4, 'cuda:0'], True, None].

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
