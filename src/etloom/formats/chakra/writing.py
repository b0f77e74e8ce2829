"""Encodes a table of nodes as a Chakra file: GlobalMetadata, then one Node message per row.

Format: mlcommons/chakra schema/protobuf/et_def.proto; [varint length][message] each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra import wire

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
        parts.append(wire.delimit_messages(_encode_nodes(nodes, start, end)))
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
        *wire.encode_integers(_ID, table["id"].to_numpy()),
        *wire.encode_texts(_NAME, table["name"]),
        *wire.encode_integers(_TYPE, table["type"].to_numpy()),
        *wire.encode_packed(_CTRL, _count_offsets(ctrl), ctrl.drop_nulls().to_numpy()),
        *wire.encode_packed(_DATA, first - first[0], nodes.dependencies[first[0] : first[-1]]),
        *wire.encode_integers(_START, table["start_time_micros"].to_numpy()),
        *wire.encode_integers(_DURATION, table["duration_micros"].to_numpy()),
    ]
    for number, suffix in ((_INPUTS, "in"), (_OUTPUTS, "out")):
        parts = []
        for part_number, part in enumerate(("values", "shapes", "types"), 1):
            parts += wire.encode_texts(part_number, table[f"{part}_{suffix}"])
        fields += wire.encode_messages(number, parts)
    for name, value_field in _ATTRIBUTES.items():
        is_text = value_field == _STRING
        encode = wire.encode_text_attribute if is_text else wire.encode_integer_attribute
        fields += encode(_ATTR, name, value_field, table[name])
    return wire.join_fields(fields)


def _count_offsets(values: pl.Series) -> NDArray[np.int64]:
    """Return, for each row, the number of non-null values in the rows before it; the last entry is the total."""
    return pl.Series([0]).append(values.is_not_null().cast(pl.Int64)).cum_sum().to_numpy()
