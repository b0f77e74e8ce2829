"""Chakra's protobuf messages (package ChakraProtoMsg, proto3), declared here so that no protoc is needed.

Source: mlcommons/chakra schema/protobuf/et_def.proto. They live in a pool of their own, so that
a program may import Chakra's generated module as well.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
"""CollectiveCommType in the spelling of `etloom.kinds`."""

_SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
_FIELD = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "ChakraProtoMsg"


def _build() -> dict[str, Any]:
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


_MESSAGES = _build()
GlobalMetadata: Any = _MESSAGES["GlobalMetadata"]
Node: Any = _MESSAGES["Node"]
AttributeProto: Any = _MESSAGES["AttributeProto"]
