"""Reads fields of many protobuf messages without a schema: each numpy pass reads the next field of every message.

A profile holds millions of small messages (events, and values of events), for which protobuf's own objects take
minutes. Nothing is trusted: a field that exceeds its message ends this message, and the work is linear in the bytes.

Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etloom.formats.io.limits import check_rows, max_rows

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types."""
_PADDING = 16
_MAX_VARINT_BYTES = 10
_FEW_MESSAGES = 48
"""With fewer messages, a round of numpy costs more than reading their fields one after another."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Fields:
    """Fields of many protobuf messages as columns, one entry per field; the fields of a message are in file order.

    Attributes:
        message: Index of the message.
        number: Field number.
        wire: Wire type.
        value: Integer as unsigned 64 bits, or bits of a float; of text, bytes and messages the length in bytes.
        start: Offset of the content in the data.
    """

    message: NDArray[np.int64]
    number: NDArray[np.int64]
    wire: NDArray[np.int64]
    value: NDArray[np.uint64]
    start: NDArray[np.int64]

    def select(self, number: int, wire: int) -> Fields:
        """Return the fields that have the field number ``number`` and the wire type ``wire``."""
        return self[(self.number == number) & (self.wire == wire)]

    def __getitem__(self, mask: NDArray[np.bool_]) -> Fields:
        columns = (self.message, self.number, self.wire, self.value, self.start)
        return Fields(*(column[mask] for column in columns))  # type: ignore[arg-type]

    def get_integers(self, number: int, count: int, default: int = 0) -> NDArray[np.int64]:
        """Return, for each of ``count`` messages, the last signed integer in the field ``number``, or ``default``."""
        fields = self.select(number, VARINT)
        values = np.full(count, default, np.int64)
        values[fields.message] = fields.value.view(np.int64)
        return values

    @property
    def ends(self) -> NDArray[np.int64]:
        """Byte offset after the content of each field that is text, bytes or a message."""
        ends: NDArray[np.int64] = self.start + self.value.view(np.int64)
        return ends


class MessageData:
    """The bytes of a protobuf file, with methods that scan the fields of its messages.

    Args:
        data: The content of the file.
        path: The file, if the number of its messages is limited.

    Attributes:
        damaged: Number of messages so far that contain something else than fields, or a field that exceeds them.
        truncated: Whether the data ends inside a message that was scanned with ``clip``.
    """

    def __init__(self, data: bytes, path: Path | None = None) -> None:
        self.data = data
        self._path, self._max_rows = path, None if path is None else max_rows()
        self.damaged = 0
        self.truncated = False
        self._bytes = np.frombuffer(data + bytes(_PADDING), np.uint8)

    def read_text(self, start: int, length: int) -> str:
        """Return ``length`` bytes from an offset as UTF-8 text; invalid bytes become U+FFFD."""
        return self.data[start : start + length].decode("utf-8", "replace")

    def read_texts(self, fields: Fields) -> list[str]:
        """Return the content of each field as UTF-8 text; invalid bytes become U+FFFD."""
        spans = zip(fields.start.tolist(), fields.ends.tolist(), strict=True)
        return [self.data[start:end].decode("utf-8", "replace") for start, end in spans]

    def scan_all(self) -> Fields:
        """Return the fields of the outermost message, which is the whole file."""
        return self.scan(np.zeros(1, np.int64), np.full(1, len(self.data), np.int64), clip=True)

    def scan(self, starts: NDArray[np.int64], ends: NDArray[np.int64], *, clip: bool = False) -> Fields:
        """Return the fields of the messages at the byte ranges [starts[i], ends[i]).

        Of a damaged message, the fields before the damage are returned, and `damaged` is increased.

        Args:
            starts: Offset of each message.
            ends: Offset after each message.
            clip: Also return the part of a field that exceeds its message where the data ends; for messages of
                messages, of which a part is of use.

        Raises:
            LimitError: There are more messages than the memory holds rows.
        """
        if self._max_rows is not None:
            check_rows(starts.size, self._path, self._max_rows)
        cursor = starts.astype(np.int64)
        rows = np.flatnonzero(cursor < ends)
        rounds: list[Fields] = []
        if clip:  # the last message may be cut off; it is read sequentially
            rows = rows[ends[rows] < len(self.data)]
        while rows.size >= _FEW_MESSAGES:
            fields, after = self._scan_one_field_each(rows, cursor[rows], ends[rows])
            valid = after >= 0
            self.damaged += int((~valid).sum())
            rounds.append(fields[valid])
            rows, after = rows[valid], after[valid]
            cursor[rows] = after
            rows = rows[after < ends[rows]]
        if clip:
            rows = np.union1d(rows, np.flatnonzero((starts < ends) & (ends == len(self.data))))
        rest = [self._scan_sequentially(row, int(cursor[row]), int(ends[row]), clip) for row in rows.tolist()]
        return _join([*rounds, _build_fields([field for fields in rest for field in fields])])

    def _scan_one_field_each(
        self, rows: NDArray[np.int64], at: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[Fields, NDArray[np.int64]]:
        """Read the field at offset ``at[i]`` of each message; return the fields and the offsets after them, or -1."""
        key, at = self._read_varints(at)
        number, wire = (key >> np.uint64(3)).astype(np.int64), (key & np.uint64(7)).astype(np.int64)
        at = np.minimum(at, len(self.data))
        value, after = self._read_varints(at)
        start = np.where(wire == LENGTH, after, at)
        for fixed, dtype in ((FIXED64, np.uint64), (FIXED32, np.uint32)):
            is_fixed = np.flatnonzero(wire == fixed)
            width = np.dtype(dtype).itemsize
            content = self._bytes[at[is_fixed, None] + np.arange(width)]
            value[is_fixed] = np.ascontiguousarray(content).view(dtype)[:, 0]
            after[is_fixed] = at[is_fixed] + width
        is_length = wire == LENGTH
        too_long = is_length & (value > np.maximum(ends - after, 0).astype(np.uint64))
        after = np.where(is_length & ~too_long, after + value.view(np.int64), after)
        known = np.isin(wire, (VARINT, FIXED64, LENGTH, FIXED32)) & (number > 0)
        valid = known & ~too_long & (after <= ends)
        return Fields(rows, number, wire, value, start), np.where(valid, after, -1)

    def _read_varints(self, at: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Decode the varint at each offset; return values and offsets after them, beyond the data if unterminated."""
        value = np.zeros(at.size, np.uint64)
        after = at.copy()
        rest = np.arange(at.size)
        last = len(self._bytes) - 1
        for i in range(_MAX_VARINT_BYTES):
            byte = self._bytes[np.minimum(at[rest] + i, last)]
            value[rest] |= (byte & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * i)
            after[rest] += 1
            rest = rest[byte >= 0x80]
            if not rest.size:
                return value, after
        after[rest] = len(self.data) + _PADDING
        return value, after

    def _scan_sequentially(
        self, row: int, at: int, end: int, clip: bool
    ) -> list[tuple[int, int, int, int, int]]:
        """Read all fields of one message in a loop; return tuples (message, number, wire, value, start)."""
        fields = []
        while at < end:
            try:
                key, at = self.read_varint(at)
                number, wire, start = key >> 3, key & 7, at
                if wire == VARINT:
                    value, at = self.read_varint(at)
                elif wire == LENGTH:
                    value, start = self.read_varint(at)
                    at = start + value
                    if at > end == len(self.data) and clip:
                        self.truncated = True
                        value, at = max(end - start, 0), end
                elif wire in (FIXED64, FIXED32):
                    at = start + (8 if wire == FIXED64 else 4)
                    value = int.from_bytes(self.data[start:at], "little")
                else:
                    raise ValueError
                if not number or at > end:
                    raise ValueError
            except (IndexError, ValueError):
                self.damaged += 1
                break
            fields.append((row, number, wire, value, start))
        return fields

    def read_varint(self, at: int) -> tuple[int, int]:
        """Return the number at an offset, and the offset after it.

        Raises:
            IndexError: The data ends inside the number.
            ValueError: It has more than ten bytes.
        """
        byte = self.data[at]
        if byte < 0x80:
            return byte, at + 1
        value = byte & 0x7F
        for shift in range(7, 7 * _MAX_VARINT_BYTES, 7):
            at += 1
            byte = self.data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & _MASK, at + 1
        raise ValueError


def _build_fields(rows: list[tuple[int, int, int, int, int]]) -> Fields:
    message, number, wire, value, start = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return Fields(
        np.array(message, np.int64),
        np.array(number, np.int64),
        np.array(wire, np.int64),
        np.array(value, np.uint64),
        np.array(start, np.int64),
    )


def _join(parts: list[Fields]) -> Fields:
    columns = ("message", "number", "wire", "value", "start")
    return Fields(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))
