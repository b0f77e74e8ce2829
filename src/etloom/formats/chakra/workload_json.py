"""Converts the workload JSON, which Chakra's C++ feeder reads as an alternative to .et, to .et messages.

    {"workload_graph": [{"Id": 0, "Name": "mm", "NodeType": 4, "is_cpu_op": false, "runtime": 5, "data_deps": []}, ...]}

``runtime`` is in us. Communications add comm_type, comm_size, comm_src, comm_dst, comm_tag.

Format: mlcommons/chakra src/feeder/json_node.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from etloom.core.errors import ReadError
from etloom.formats.chakra import protobuf as pb
from etloom.formats.io.json_text import load_json

_START = re.compile(rb'\s*\{\s*"workload_graph"\s*:')
_NODE_KEYS = ("Id", "Name", "NodeType", "runtime", "data_deps")
_INT32, _UINT64 = ("comm_priority", "comm_src", "comm_dst", "comm_tag"), ("tensor_size",)


def is_workload(data: bytes) -> bool:
    """Return whether a file, or its beginning, is a workload JSON: an object that begins with workload_graph."""
    return _START.match(data) is not None


def encode_workload(data: bytes, path: Path) -> bytes:
    """Convert the content of a workload JSON file to the bytes of a .et file.

    Raises:
        ReadError: It is not JSON, or a node has a value that a .et file cannot hold.
    """
    try:
        nodes = load_json(data)["workload_graph"]
    except (ValueError, RecursionError) as error:
        raise ReadError(f"is not JSON: {error}", where=path) from None
    if not isinstance(nodes, list):
        raise ReadError(f"workload_graph: expected a list, got {type(nodes).__name__}", where=path)
    messages = [pb.delimit_message(pb.GlobalMetadata(version="workload_graph"))]
    for index, node in enumerate(nodes):
        try:
            messages.append(pb.delimit_message(_to_message(node)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReadError(f"workload_graph, node {index}: {error!s:.100}", where=path) from None
    return b"".join(messages)


def _to_message(node: dict[str, Any]) -> Any:
    node_type = node.get("NodeType", 0)
    message = pb.Node(
        id=node["Id"],
        name=node.get("Name", ""),
        type=pb.TYPE_NUMBERS[node_type] if isinstance(node_type, str) else node_type,
        duration_micros=node.get("runtime", 0),
        data_deps=node.get("data_deps", []),
    )
    for name, value in node.items():
        if name not in _NODE_KEYS and value is not None:
            setattr(message.attr.add(name=name), _choose_field(name, value), value)
    return message


def _choose_field(name: str, value: Any) -> str:
    if name == "is_cpu_op" or isinstance(value, bool):
        return "bool_val"
    if isinstance(value, int):
        return "int32_val" if name in _INT32 else "uint64_val" if name in _UINT64 else "int64_val"
    if isinstance(value, str):
        return "string_val"
    if isinstance(value, float):
        return "double_val"
    raise TypeError(f"{name}: expected a number or text, got {type(value).__name__}")
