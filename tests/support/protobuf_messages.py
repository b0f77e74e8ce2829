"""Messages of protobuf's own library, declared in a few lines instead of generated from .proto files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto


def declare(package: str, messages: Mapping[str, str], root: str) -> Any:
    """Return the class of the message ``root``.

    Args:
        package: The package that is declared.
        messages: Name -> fields as ``name=number:type``, with a star in place of the colon if the field is repeated.
        root: The name of a message.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for text in fields.split():
            field, _, declared = text.partition("=")
            number, kind = declared.replace("*", ":").split(":")
            scalar = kind not in messages
            message.field.add(
                name=field,
                number=int(number),
                label=_FIELD.LABEL_REPEATED if "*" in declared else _FIELD.LABEL_OPTIONAL,
                type=getattr(_FIELD, f"TYPE_{kind.upper()}") if scalar else _FIELD.TYPE_MESSAGE,
                type_name=None if scalar else f".{package}.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{root}"))
