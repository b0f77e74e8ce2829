"""Chakra's protobuf messages (package ChakraProtoMsg, proto3), declared here so that no protoc is needed.

Source: mlcommons/chakra schema/protobuf/et_def.proto. They live in a pool of their own, so that
a program may import Chakra's generated module as well. Files are such messages, each after its length.
"""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from etloom.formats.tables.building import Stat

NODE_TYPES = {
    0: "INVALID_NODE",
    1: "METADATA_NODE",
    2: "MEM_LOAD_NODE",
    3: "MEM_STORE_NODE",
    4: "COMP_NODE",
    5: "COMM_SEND_NODE",
    6: "COMM_RECV_NODE",
    7: "COMM_COLL_NODE",
}
COLLECTIVES = {
    0: "all_reduce",
    1: "reduce",
    2: "all_gather",
    3: "gather",
    4: "scatter",
    5: "broadcast",
    6: "all_to_all",
    7: "reduce_scatter",
    8: "reduce_scatter_block",
    9: "barrier",
}
"""CollectiveCommType in the spelling of `etloom.core.categories`."""

_SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
_FIELD = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "ChakraProtoMsg"


def _build_message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")

    def message(name: str, *fields: tuple[str, int, str, bool]) -> Any:
        declared = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            scalar = kind in _SCALARS
            declared.field.add(
                name=field,
                number=number,
                label=_FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL,
                type=getattr(_FIELD, f"TYPE_{kind.upper()}") if scalar else _FIELD.TYPE_MESSAGE,
                type_name=None if scalar else f".{_PACKAGE}.{kind}",
            )
        return declared

    message("GlobalMetadata", ("version", 1, "string", False), ("attr", 2, "AttributeProto", True))
    for scalar in _SCALARS:
        message(f"{scalar.capitalize()}List", ("values", 1, scalar, True))
    attribute = message("AttributeProto", ("name", 1, "string", False), ("doc_string", 2, "string", False))
    attribute.oneof_decl.add(name="value")
    for index, scalar in enumerate(_SCALARS):
        for number, suffix in ((3 + 2 * index, "val"), (4 + 2 * index, "list")):
            single = suffix == "val"
            attribute.field.add(
                name=f"{scalar}_{suffix}",
                number=number,
                label=_FIELD.LABEL_OPTIONAL,
                type=getattr(_FIELD, f"TYPE_{scalar.upper()}") if single else _FIELD.TYPE_MESSAGE,
                type_name=None if single else f".{_PACKAGE}.{scalar.capitalize()}List",
                oneof_index=0,
            )
    message(
        "IOInfo", *((name, at, "string", False) for at, name in enumerate(("values", "shapes", "types"), 1))
    )
    message(
        "Node",
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        # An enumeration on the wire; as a number, so that a type from a later version is read as it is.
        ("type", 3, "int32", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindFileByName(file.name)
    return {
        name: message_factory.GetMessageClass(descriptor)
        for name, descriptor in found.message_types_by_name.items()
    }


_MESSAGES = _build_message_classes()
GlobalMetadata: Any = _MESSAGES["GlobalMetadata"]
Node: Any = _MESSAGES["Node"]
AttributeProto: Any = _MESSAGES["AttributeProto"]

_MAX_VARINT_BYTES = 10


def delimit_message(message: Any) -> bytes:
    """A message after its length, as files hold it."""
    body: bytes = message.SerializeToString()
    length, rest = bytearray(), len(body)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return bytes(length) + body


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Raises IndexError where data ends inside it, ValueError where it is too long."""
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        byte = data[at + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("a varint of more than ten bytes")


def split_messages(data: bytes, cut: str | None = None) -> tuple[list[memoryview], list[Stat]]:
    """The messages of a file, each after its length; and that it ends early, which ``cut`` may tell why."""
    view, at = memoryview(data), 0
    found: list[memoryview] = []
    while at < len(data):
        try:
            length, begin = decode_varint(data, at)
            if begin + length > len(data):
                raise IndexError
        except (IndexError, ValueError):
            example = f"{len(data) - at:,} bytes after message {len(found):,} belong to no whole one"
            return found, [("read.truncated", "data_loss", 1, f"{example}: {cut or 'the end is missing'}")]
        found.append(view[begin : begin + length])
        at = begin + length
    return found, [("read.truncated", "data_loss", 1, cut)] if cut else []


def parse_metadata(message: bytes | memoryview) -> Any:
    """The GlobalMetadata, or None where the message is something else: a Node is no valid one."""
    try:
        found = GlobalMetadata.FromString(bytes(message))
    except DecodeError:
        return None
    size = found.ByteSize()
    found.DiscardUnknownFields()
    return found if found.ByteSize() == size else None


def parse_node(message: bytes | memoryview) -> Any:
    """The Node, or None where the message is something else."""
    try:
        return Node.FromString(bytes(message))
    except DecodeError:
        return None


def decode_attributes(attrs: Any) -> dict[str, Any]:
    """Name -> value of attributes; bytes as base64 text; ``NAME.doc_string`` where one is said."""
    values: dict[str, Any] = {}
    for attr in attrs:
        kind = attr.WhichOneof("value")
        if kind is None:
            values[attr.name] = None
        else:
            value = getattr(attr, kind)
            values[attr.name] = (
                _to_json_value(list(value.values)) if kind.endswith("_list") else _to_json_value(value)
            )
        if attr.doc_string:
            values[f"{attr.name}.doc_string"] = attr.doc_string
    return values


def _to_json_value(value: Any) -> Any:
    """Bytes as base64 text, which JSON can hold."""
    if isinstance(value, list):
        return [_to_json_value(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
