"""Chakra's protobuf messages (package ChakraProtoMsg, proto3), declared here so that protoc is not needed.

Source: mlcommons/chakra schema/protobuf/et_def.proto. The messages have a separate descriptor pool, so that a program
may import Chakra's generated module as well. A file is a sequence of messages, each preceded by its length.
"""

from __future__ import annotations

import base64
from collections.abc import Container
from functools import cache
from typing import Any

from etloom.core.schema import Stat

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
TYPE_NUMBERS = {name: number for number, name in NODE_TYPES.items()}
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
_PACKAGE = "ChakraProtoMsg"


@cache
def _build_message_classes() -> dict[str, Any]:
    """Build the protobuf message classes at first use, because importing protobuf takes 40 ms."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")

    def message(name: str, *fields: tuple[str, int, str, bool]) -> Any:
        declared = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            scalar = kind in _SCALARS
            declared.field.add(
                name=field,
                number=number,
                label=field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL,
                type=getattr(field_type, f"TYPE_{kind.upper()}") if scalar else field_type.TYPE_MESSAGE,
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
                label=field_type.LABEL_OPTIONAL,
                type=getattr(field_type, f"TYPE_{scalar.upper()}") if single else field_type.TYPE_MESSAGE,
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
        # An enumeration in the schema; declared as a number, so that types of later versions can be read.
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
    types = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in types.items()}


def __getattr__(name: str) -> Any:
    """Return the protobuf message class named ``name``, such as GlobalMetadata, Node or AttributeProto."""
    if not name[0].isupper() or name not in _build_message_classes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _build_message_classes()[name]


MAX_VARINT_BYTES = 10


def encode_varint(value: int) -> bytes:
    """Encode a non-negative integer as a protobuf varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Decode the protobuf varint at a byte offset; return its value and the offset after it.

    Raises:
        IndexError: The data ends inside the varint.
        ValueError: The varint is too long.
    """
    value = 0
    for shift in range(MAX_VARINT_BYTES):
        byte = data[offset + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, offset + shift + 1
    raise ValueError("a varint of more than ten bytes")


def delimit_message(message: Any) -> bytes:
    """Encode a message as in a .et file: its length as a varint, then its bytes."""
    body: bytes = message.SerializeToString()
    return encode_varint(len(body)) + body


def split_messages(data: bytes, truncation: str | None = None) -> tuple[list[memoryview], list[Stat]]:
    """Split the content of a .et file into the bytes of its length-prefixed messages.

    Args:
        data: The file without compression.
        truncation: Why the data ends early, if the decompression reported it.

    Returns:
        The messages, and a row of stats if the file is truncated.
    """
    view, offset = memoryview(data), 0
    messages: list[memoryview] = []
    while offset < len(data):
        try:
            length, begin = decode_varint(data, offset)
            if begin + length > len(data):
                raise IndexError
        except (IndexError, ValueError):
            remainder = (
                f"{len(data) - offset:,} bytes after message {len(messages):,} are not a complete message"
            )
            return messages, [
                Stat("read.truncated", "data_loss", 1, f"{remainder}: {truncation or 'the end is missing'}")
            ]
        messages.append(view[begin : begin + length])
        offset = begin + length
    return messages, [Stat("read.truncated", "data_loss", 1, truncation)] if truncation else []


def _decode_error() -> type[Exception]:
    from google.protobuf.message import DecodeError

    return DecodeError  # type: ignore[no-any-return]


def parse_metadata(message: bytes | memoryview) -> Any:
    """Parse the bytes of a GlobalMetadata message; return None if they are something else, such as a Node."""
    try:
        metadata = _build_message_classes()["GlobalMetadata"].FromString(bytes(message))
    except _decode_error():
        return None
    size = metadata.ByteSize()
    metadata.DiscardUnknownFields()
    return metadata if metadata.ByteSize() == size else None


def parse_node(message: bytes | memoryview) -> Any:
    """Parse the bytes of a Node message; return None if they cannot be parsed."""
    try:
        return _build_message_classes()["Node"].FromString(bytes(message))
    except _decode_error():
        return None


def decode_attributes(attributes: Any, names: Container[str] | None = None) -> dict[str, Any]:
    """Return the values of AttributeProtos by name, bytes as base64 text, and doc strings as ``NAME.doc_string``.

    With ``names`` only the values of these attributes, without doc strings.
    """
    values: dict[str, Any] = {}
    for attribute in attributes:
        name = attribute.name
        if names is not None and name not in names:
            continue
        field = attribute.WhichOneof("value") or "name"  # without a value: absent
        value = getattr(attribute, field)
        if value.__class__ not in _PLAIN_TYPES:
            value = _to_json_value(list(value.values) if field.endswith("_list") else value)
        values[name] = None if field == "name" else value
        if names is None and attribute.doc_string:
            values[f"{name}.doc_string"] = attribute.doc_string
    return values


_PLAIN_TYPES = frozenset({int, str, bool, float})


def _to_json_value(value: Any) -> Any:
    """Convert bytes, also inside lists, to base64 text for JSON; return other values unchanged."""
    if isinstance(value, list):
        return [_to_json_value(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
