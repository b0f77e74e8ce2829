"""A pickle of plain values read without running anything that the file says.

Two walls. The opcodes are scanned first: only those that make lists, dicts, tuples, numbers, text, bytes, booleans and
None are let through, so a file that names a class or a function is refused before a byte of it is executed.
The unpickler that then runs refuses every class all the same.
"""

from __future__ import annotations

import io
import pickle
import pickletools
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
FLIGHT_RECORDER_REMEDY = "dump as JSON: torch._C._distributed_c10d._dump_fr_trace_json()"
_MOST_DIGITS = 4000
_TEXT_UNIT = 64


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is refused")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("a persistent id is refused")


def load_plain_values(
    data: bytes, where: object, most_values: int | None = 10_000_000, remedy: str = FLIGHT_RECORDER_REMEDY
) -> Any:
    """The value of a pickle that holds plain values only.

    most_values: None for a caller that walks no further than the file is long. remedy: of what does more.

    Raises ReadError for any other opcode and for a damaged pickle, LimitError where the value, written out in
    full, would have more than ``most_values`` parts (shared parts count as often as they occur).
    """
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name not in _ALLOWED:
                raise ReadError(
                    f"is a pickle that does more than hold plain values: {opcode.name} at byte {position}",
                    where=str(where),
                    remedy=remedy,
                )
            # The memo is an array of the highest index: a few bytes could ask for all memory.
            if opcode.name in _MEMO and isinstance(argument, int) and argument > len(data):
                raise ReadError(f"is a damaged pickle: memo {argument} at byte {position}", where=str(where))
            if isinstance(argument, int) and argument.bit_length() > 4 * _MOST_DIGITS:
                raise LimitError(f"holds an integer of over {_MOST_DIGITS} digits", where=str(where))
        value = _Unpickler(io.BytesIO(data)).load()
    except (ReadError, LimitError):
        raise
    # What a damaged pickle raises is not declared: the module's own error and those of the values it builds.
    except (pickle.UnpicklingError, ValueError, EOFError, TypeError, IndexError, KeyError) as error:
        raise ReadError(f"is a damaged pickle: {error}", where=str(where)) from None
    except (AttributeError, UnicodeError, OverflowError, MemoryError, RecursionError) as error:
        raise ReadError(f"is a damaged pickle: {error}", where=str(where)) from None
    if most_values is not None:
        _check_value_count(value, where, most_values)
    return value


def _check_value_count(value: Any, where: object, most: int) -> None:
    parts, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        parts += 1
        if isinstance(one, dict):
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
        elif isinstance(one, (str, bytes)):
            parts += len(one) // _TEXT_UNIT
        if parts + len(waiting) > most:
            raise LimitError(f"holds more than {most:,} values", where=str(where))
