"""Protobuf messages of many nodes at once: a column of values becomes a column of encoded fields.

Each function gives an Arrow array with the bytes of one field a row, none where the field is absent, so that rows are
messages once the fields of each are joined. 40,000 nodes take a tenth of a second; protobuf's own objects take
seconds.

Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

VARINT, LENGTH = 0, 2
"""Wire types."""

_MAX_VARINT_BYTES = 10


def encode_key(number: int, wire_type: int) -> bytes:
    """What stands before the value of a field."""
    return encode_varint(number << 3 | wire_type)


def encode_varint(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_field(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return encode_key(number, LENGTH) + encode_varint(len(content)) + content


def encode_varints(
    values: NDArray[np.int64] | NDArray[np.uint64],
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of all values one after the other, and how many each takes. Negative ones wrap to 64 bits."""
    rest = np.ascontiguousarray(values).astype(np.int64).view(np.uint64)
    widths = np.ones(len(rest), np.int64)
    for at in range(1, _MAX_VARINT_BYTES):
        widths += rest >= np.uint64(1) << np.uint64(7 * at)
    starts = np.cumsum(widths) - widths
    out = np.empty(int(widths.sum()), np.uint8)
    more = np.arange(len(rest))
    for at in range(_MAX_VARINT_BYTES):
        if not more.size:
            break
        low = (rest[more] >> np.uint64(7 * at)).astype(np.uint8) & np.uint8(0x7F)
        follows = widths[more] > at + 1
        out[starts[more] + at] = low | (follows.astype(np.uint8) << 7)
        more = more[follows]
    return out, widths


def build_binary_array(content: NDArray[np.uint8], widths: NDArray[np.int64]) -> pa.BinaryArray:
    """Bytes cut into pieces of these widths."""
    offsets = np.zeros(len(widths) + 1, np.int32)
    np.cumsum(widths, out=offsets[1:])
    return pa.Array.from_buffers(
        pa.binary(), len(widths), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(content))]
    )


def encode_integers(
    number: int, values: NDArray[np.int64], *, keep: NDArray[np.bool_] | None = None
) -> list[pa.Array]:
    """A varint field; absent where ``keep`` is false (default: where the value is 0, as proto3 asks)."""
    keep = values != 0 if keep is None else keep
    return [_repeat_where(encode_key(number, VARINT), keep), _encode_varints_where(values, keep)]


def encode_packed(number: int, first: NDArray[np.int64], values: NDArray[np.int64]) -> list[pa.Array]:
    """A repeated varint field: row i has values[first[i]:first[i + 1]]."""
    content, widths = encode_varints(values)
    ends = np.append(0, np.cumsum(widths))
    return _encode_length_delimited(number, [build_binary_array(content, np.diff(ends[first]))])


def encode_texts(number: int, values: pl.Series) -> list[pa.Array]:
    """A field of text; absent where null or empty."""
    return _encode_length_delimited(
        number, [values.fill_null("").to_arrow().cast(pa.large_binary()).cast(pa.binary())]
    )


def encode_messages(number: int, parts: Sequence[pa.Array]) -> list[pa.Array]:
    """A field that is a message of these fields; absent where it is empty."""
    return _encode_length_delimited(number, [join_fields(parts)])


def encode_integer_attribute(number: int, name: str, of: int, values: pl.Series) -> list[pa.Array]:
    """An attribute message {1: name, of: varint}; absent where null."""
    if values.null_count() == len(values):
        return []
    keep = values.is_not_null().to_numpy()
    numbers = values.fill_null(0).cast(pl.Int64).to_numpy()
    value = _encode_varints_where(numbers, keep)
    widths = _measure_lengths(value)
    head = encode_field(1, name.encode()) + encode_key(of, VARINT)
    before = [
        b"" if not width else encode_key(number, LENGTH) + encode_varint(len(head) + width) + head
        for width in range(11)
    ]
    return [_take_values(before, widths), value]


def encode_text_attribute(number: int, name: str, of: int, values: pl.Series) -> list[pa.Array]:
    """An attribute message {1: name, of: text}; absent where null. For text that repeats."""
    if values.null_count() == len(values):
        return []
    distinct = values.unique().drop_nulls().cast(pl.String)
    head = encode_field(1, name.encode())
    encoded = [encode_field(number, head + encode_field(of, text.encode())) for text in distinct]
    return [_look_up_encoded(values, distinct, encoded)]


def join_fields(parts: Sequence[pa.Array]) -> pa.BinaryArray:
    """The parts of each row, one after the other."""
    nothing = build_binary_array(np.zeros(0, np.uint8), np.zeros(1, np.int64))[0]
    return pc.binary_join_element_wise(*parts, nothing)


def delimit_messages(messages: pa.BinaryArray) -> bytes:
    """All messages, each after its length."""
    content, widths = encode_varints(_measure_lengths(messages))
    whole = join_fields([build_binary_array(content, widths), messages])
    offsets = np.frombuffer(whole.buffers()[1], np.int32)[whole.offset : whole.offset + len(whole) + 1]
    return bytes(whole.buffers()[2][int(offsets[0]) : int(offsets[-1])]) if len(whole) else b""


def _encode_length_delimited(number: int, parts: list[pa.Array]) -> list[pa.Array]:
    content = parts[0]
    lengths = _measure_lengths(content)
    keep = lengths > 0
    return [_repeat_where(encode_key(number, LENGTH), keep), _encode_varints_where(lengths, keep), content]


def _encode_varints_where(values: NDArray[np.int64], keep: NDArray[np.bool_]) -> pa.BinaryArray:
    content, some = encode_varints(values[keep])
    widths = np.zeros(len(values), np.int64)
    widths[keep] = some
    return build_binary_array(content, widths)


def _repeat_where(content: bytes, keep: NDArray[np.bool_]) -> pa.BinaryArray:
    each = np.frombuffer(content, np.uint8)
    return build_binary_array(np.tile(each, int(keep.sum())), np.where(keep, len(content), 0))


def _look_up_encoded(values: pl.Series, distinct: pl.Series, encoded: list[bytes]) -> pa.BinaryArray:
    known = pl.DataFrame({"value": distinct, "at": np.arange(len(distinct), dtype=np.int64)})
    at = (
        values.cast(pl.String)
        .to_frame("value")
        .join(known, on="value", how="left", maintain_order="left")["at"]
    )
    return _take_values([*encoded, b""], at.fill_null(len(distinct)).to_numpy())


# pyarrow's own ways between its values and those of numpy or Python import pandas, where that is installed: 0.2 s.


def _measure_lengths(values: pa.BinaryArray) -> NDArray[np.int64]:
    """How many bytes each value has."""
    lengths = pc.binary_length(values)
    whole = np.frombuffer(lengths.buffers()[1], np.int32)
    return whole[lengths.offset : lengths.offset + len(lengths)].astype(np.int64)


def _take_values(values: list[bytes], at: NDArray[np.int64]) -> pa.BinaryArray:
    """The values at these places."""
    content = np.frombuffer(b"".join(values), np.uint8)
    places = pa.py_buffer(np.ascontiguousarray(at, np.int64))
    return build_binary_array(content, np.array([len(value) for value in values], np.int64)).take(
        pa.Array.from_buffers(pa.int64(), len(at), [None, places])
    )
