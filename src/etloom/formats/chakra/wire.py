"""Encodes protobuf messages of many nodes at once: a column of values becomes a column of encoded fields.

Each function returns columns with the bytes of one field per row, empty where the field is absent. The fields of a row
joined are its message. 40,000 nodes take a tenth of a second; protobuf's Python objects take seconds.

Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import _native
from etloom.core.arrays import encode_utf8
from etloom.formats.chakra.protobuf import MAX_VARINT_BYTES, encode_varint

VARINT, LENGTH = 0, 2
"""Wire types."""

Field: TypeAlias = "tuple[NDArray[np.int32] | None, NDArray[np.int64], NDArray[np.uint8]]"
"""A column of encoded fields: codes, offsets and bytes. Row i has the bytes between the offsets codes[i] and
codes[i] + 1; without codes, between i and i + 1."""


def encode_key(number: int, wire_type: int) -> bytes:
    """Encode the protobuf key (field number and wire type) that precedes the value of a field."""
    return encode_varint(number << 3 | wire_type)


def encode_field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited protobuf field (bytes, text or a message): key, length, content."""
    return encode_key(number, LENGTH) + encode_varint(len(content)) + content


def encode_varints(
    values: NDArray[np.int64] | NDArray[np.uint64],
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode integers as varints (negative values as 64-bit); return all bytes and the byte count of each varint."""
    rest = np.ascontiguousarray(values).astype(np.int64).view(np.uint64)
    widths = np.ones(len(rest), np.int64)
    for i in range(1, MAX_VARINT_BYTES):
        widths += rest >= np.uint64(1) << np.uint64(7 * i)
    starts = np.cumsum(widths) - widths
    content = np.empty(int(widths.sum()), np.uint8)
    remaining = np.arange(len(rest))
    for i in range(MAX_VARINT_BYTES):
        if not remaining.size:
            break
        low = (rest[remaining] >> np.uint64(7 * i)).astype(np.uint8) & np.uint8(0x7F)
        continues = widths[remaining] > i + 1
        content[starts[remaining] + i] = low | (continues.astype(np.uint8) << 7)
        remaining = remaining[continues]
    return content, widths


def build_field(content: NDArray[np.uint8], widths: NDArray[np.int64]) -> Field:
    """Build a `Field` from the concatenated bytes of its values and the byte count of each value."""
    offsets = np.zeros(len(widths) + 1, np.int64)
    np.cumsum(widths, out=offsets[1:])
    return None, offsets, content


def encode_integers(
    number: int, values: NDArray[np.int64], *, keep: NDArray[np.bool_] | None = None
) -> list[Field]:
    """Encode a varint field per row; omit it where ``keep`` is false (default: where the value is 0, as in proto3)."""
    keep = values != 0 if keep is None else keep
    return [_repeat_masked(encode_key(number, VARINT), keep), _encode_masked_varints(values, keep)]


def encode_packed(number: int, first: NDArray[np.int64], values: NDArray[np.int64]) -> list[Field]:
    """Encode a packed repeated varint field per row; row i holds values[first[i]:first[i + 1]]."""
    content, widths = encode_varints(values)
    ends = np.append(0, np.cumsum(widths))
    return _encode_length_delimited(number, build_field(content, np.diff(ends[first])))


def encode_texts(number: int, values: pl.Series) -> list[Field]:
    """Encode a text field per row; omit it where the text is null or empty."""
    return _encode_length_delimited(number, (None, *encode_utf8(values.fill_null(""))))


def encode_messages(number: int, parts: Sequence[Field]) -> list[Field]:
    """Encode a nested message per row from its encoded fields ``parts``; omit it where the message is empty."""
    return _encode_length_delimited(number, join_fields(parts))


def encode_integer_attribute(number: int, name: str, value_field: int, values: pl.Series) -> list[Field]:
    """Encode an AttributeProto {1: name, value_field: varint} per row; omit it where the value is null."""
    if values.null_count() == len(values):
        return []
    keep = values.is_not_null().to_numpy()
    numbers = values.fill_null(0).cast(pl.Int64).to_numpy()
    value = _encode_masked_varints(numbers, keep)
    widths = _measure_lengths(value)
    head = encode_field(1, name.encode()) + encode_key(value_field, VARINT)
    prefixes = [
        b"" if not width else encode_key(number, LENGTH) + encode_varint(len(head) + width) + head
        for width in range(11)
    ]
    return [_take_values(prefixes, widths), value]


def encode_text_attribute(number: int, name: str, value_field: int, values: pl.Series) -> list[Field]:
    """Encode an AttributeProto {1: name, value_field: text} per row (once per distinct text); omit it for nulls."""
    if values.null_count() == len(values):
        return []
    distinct = values.unique().drop_nulls().cast(pl.String)
    head = encode_field(1, name.encode())
    encoded = [encode_field(number, head + encode_field(value_field, text.encode())) for text in distinct]
    return [_look_up_encoded(values, distinct, encoded)]


def join_fields(parts: Sequence[Field]) -> Field:
    """Concatenate, for each row, its encoded fields to the bytes of a message."""
    codes, offsets, _ = parts[0]
    rows = len(offsets) - 1 if codes is None else len(codes)
    return None, *_native.row_texts(list(parts), rows)


def delimit_messages(messages: Field) -> bytes:
    """Concatenate all messages, each preceded by its length as a varint."""
    content, widths = encode_varints(_measure_lengths(messages))
    return join_fields([build_field(content, widths), messages])[2].tobytes()


def _encode_length_delimited(number: int, content: Field) -> list[Field]:
    lengths = _measure_lengths(content)
    keep = lengths > 0
    return [_repeat_masked(encode_key(number, LENGTH), keep), _encode_masked_varints(lengths, keep), content]


def _encode_masked_varints(values: NDArray[np.int64], keep: NDArray[np.bool_]) -> Field:
    content, masked_widths = encode_varints(values[keep])
    widths = np.zeros(len(values), np.int64)
    widths[keep] = masked_widths
    return build_field(content, widths)


def _repeat_masked(content: bytes, keep: NDArray[np.bool_]) -> Field:
    return _take_values([b"", content], keep)


def _look_up_encoded(values: pl.Series, distinct: pl.Series, encoded: list[bytes]) -> Field:
    lookup = pl.DataFrame({"value": distinct, "index": np.arange(len(distinct), dtype=np.int64)})
    texts = values.cast(pl.String).to_frame("value")
    indices = texts.join(lookup, on="value", how="left", maintain_order="left")["index"]
    return _take_values([*encoded, b""], indices.fill_null(len(distinct)).to_numpy())


def _measure_lengths(field: Field) -> NDArray[np.int64]:
    """Return the number of bytes of each value of a column."""
    codes, offsets, _ = field
    lengths: NDArray[np.int64] = np.diff(offsets)
    return lengths if codes is None else lengths[codes]


def _take_values(values: list[bytes], indices: NDArray[np.integer[Any]] | NDArray[np.bool_]) -> Field:
    """Build a column of the byte strings ``values`` at the positions ``indices``."""
    content = np.frombuffer(b"".join(values), np.uint8)
    _, offsets, content = build_field(content, np.array([len(value) for value in values], np.int64))
    return indices.astype(np.int32), offsets, content
