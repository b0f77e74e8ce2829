"""Encodes a table of nodes as a Chakra file: GlobalMetadata, then one Node message per row.

Format: mlcommons/chakra schema/protobuf/et_def.proto; [varint length][message] each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import _native
from etloom.core.arrays import encode_utf8
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.protobuf import MAX_VARINT_BYTES, encode_varint

SCHEMA_VERSION = "0.0.4"
"""Version of the schema, as in ASTRA-sim's files."""

_CHUNK_ROWS = 1 << 16
# Field numbers of Node and of AttributeProto.
_ID, _NAME, _TYPE, _CTRL, _DATA, _START, _DURATION, _INPUTS, _OUTPUTS, _ATTR = range(1, 11)
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29
_ATTRIBUTES = {
    "is_cpu_op": _BOOL, "num_ops": _INT64, "tensor_size": _UINT64,
    "comm_type": _INT64, "comm_size": _INT64, "comm_src": _INT32, "comm_dst": _INT32,
    "comm_tag": _INT32, "pg_name": _STRING, "rf_id": _INT64, "fw_parent": _INT64, "seq_id": _INT64, "scope": _INT64,
    "tid": _INT64, "fw_tid": _INT64, "op_schema": _STRING, "kernel_backend": _STRING, "kernel_file": _STRING,
    "et_id": _INT64, "cat": _STRING, "part": _INT64, "stream": _INT64, "device": _INT64, "start_ns": _INT64,
    "duration_ns": _INT64, "inclusive_ns": _INT64, "collective": _STRING, "dtype": _STRING, "root": _INT64,
    "in_msg_nelems": _INT64, "out_msg_nelems": _INT64, "pg_size": _INT64, "comm_seq": _INT64,
    "group": _STRING, "replayed": _BOOL,
}  # fmt: skip
"""Attributes of nodes and the fields of their values: first those of Chakra's feeder and converter, then etloom's."""
NODE_SCHEMA: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(("id", "type", "ctrl", "start_time_micros", "duration_micros"), pl.Int64),
    **dict.fromkeys(("name", "values_in", "shapes_in", "types_in"), pl.String),
    **dict.fromkeys(("values_out", "shapes_out", "types_out"), pl.String),
    **{
        name: {_BOOL: pl.Boolean, _STRING: pl.String}.get(kind, pl.Int64)
        for name, kind in _ATTRIBUTES.items()
    },
}
"""Columns of `NodeTable.table`."""


@dataclass(frozen=True, eq=False)
class NodeTable:
    """The nodes of a Chakra file as a table, and their data dependencies as arrays.

    Attributes:
        table: One row per node, in the order of ids, which count from 1. Columns: id, name, type, ctrl (id of the
            control dependency, or null), start_time_micros, duration_micros; values, shapes and types with the
            suffixes _in and _out (texts in Python's notation); and the attributes.
        first: Row i depends on the ids ``dependencies[first[i]:first[i + 1]]``; one value more than there are rows.
        dependencies: Ids of nodes, each lower than that of the row that depends on it.
    """

    table: pl.DataFrame
    first: NDArray[np.int64]
    dependencies: NDArray[np.int64]


def encode_file(nodes: NodeTable, metadata: Mapping[str, str | int | None]) -> bytes:
    """Encode nodes and metadata as the bytes of an uncompressed .et file.

    Args:
        nodes: The nodes.
        metadata: Attributes of the GlobalMetadata; those that are None are left out.
    """
    parts = [_encode_metadata(metadata)]
    for start in range(0, nodes.table.height, _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, nodes.table.height)
        parts.append(delimit_messages(_encode_nodes(nodes, start, end)))
    return b"".join(parts)


def _encode_metadata(attributes: Mapping[str, str | int | None]) -> bytes:
    metadata = pb.GlobalMetadata(version=SCHEMA_VERSION)
    for name, value in attributes.items():
        if value is not None:
            field = "string_val" if isinstance(value, str) else "int64_val"
            setattr(metadata.attr.add(name=name), field, value)
    return pb.delimit_message(metadata)


def _encode_nodes(nodes: NodeTable, start: int, end: int) -> Any:
    """Encode the nodes in rows ``start`` to ``end`` (exclusive) as Node messages, with fields by ascending number."""
    table = nodes.table[start:end]
    first = nodes.first[start : end + 1]
    ctrl = table["ctrl"]
    fields = [
        *encode_integers(_ID, table["id"].to_numpy()),
        *encode_texts(_NAME, table["name"]),
        *encode_integers(_TYPE, table["type"].to_numpy()),
        *encode_packed(_CTRL, _count_offsets(ctrl), ctrl.drop_nulls().to_numpy()),
        *encode_packed(_DATA, first - first[0], nodes.dependencies[first[0] : first[-1]]),
        *encode_integers(_START, table["start_time_micros"].to_numpy()),
        *encode_integers(_DURATION, table["duration_micros"].to_numpy()),
    ]
    for number, suffix in ((_INPUTS, "in"), (_OUTPUTS, "out")):
        parts = []
        for part_number, part in enumerate(("values", "shapes", "types"), 1):
            parts += encode_texts(part_number, table[f"{part}_{suffix}"])
        fields += encode_messages(number, parts)
    for name, value_field in _ATTRIBUTES.items():
        is_text = value_field == _STRING
        encode = encode_text_attribute if is_text else encode_integer_attribute
        fields += encode(_ATTR, name, value_field, table[name])
    return join_fields(fields)


def _count_offsets(values: pl.Series) -> NDArray[np.int64]:
    """Return, for each row, the number of non-null values in the rows before it; the last entry is the total."""
    return pl.Series([0]).append(values.is_not_null().cast(pl.Int64)).cum_sum().to_numpy()


# Encodes protobuf messages of many nodes at once: a column of values becomes a column of encoded fields.
#
# Each function returns columns with the bytes of one field per row, empty where the field is absent. The fields of a
# row joined are its message. 40,000 nodes take a tenth of a second; protobuf's Python objects take seconds.
#
# Encoding: https://protobuf.dev/programming-guides/encoding/

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
