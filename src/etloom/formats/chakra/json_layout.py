"""Formats the messages of a Chakra file as one JSON object, with the field names of the schema.

    {"metadata": {"version": "0.0.4", "attr": {"rank": 0}},
     "nodes": [{"id": 1, "name": "aten::mm", "type": "COMP_NODE", "ctrl_deps": [], "data_deps": [], ...,
                "inputs": {"values": [...], "shapes": [...], "types": [...]}, "attr": {"is_cpu_op": true}}]}

Numbers of any size are JSON numbers. Inputs and outputs, which the file stores as text in Python's notation, become
lists; a text that is not a list of plain values remains text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from etloom.formats.chakra import protobuf as pb
from etloom.formats.io import safe_values
from etloom.formats.tables.node_table import to_json


def format_lines(metadata: Any, nodes: Iterable[Any]) -> Iterator[bytes]:
    """Yield the text of a Chakra file's JSON object as UTF-8 pieces, with one line per node.

    Args:
        metadata: GlobalMetadata message, or None.
        nodes: Node messages.
    """
    content = (
        {} if metadata is None else {"version": metadata.version, "attr": pb.decode_attributes(metadata.attr)}
    )
    yield f'{{"metadata": {to_json(content)},\n"nodes": ['.encode()
    separator = "\n"
    for node in nodes:
        yield (separator + to_json(_to_dict(node))).encode()
        separator = ",\n"
    yield b"\n]}\n"


def _to_dict(node: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "id": node.id,
        "name": node.name,
        "type": pb.NODE_TYPES.get(node.type, node.type),
        "ctrl_deps": list(node.ctrl_deps),
        "data_deps": list(node.data_deps),
        "start_time_micros": node.start_time_micros,
        "duration_micros": node.duration_micros,
    }
    for name, arguments in (("inputs", node.inputs), ("outputs", node.outputs)):
        if arguments.values or arguments.shapes or arguments.types:
            content[name] = {
                part: _parse_list(getattr(arguments, part)) for part in ("values", "shapes", "types")
            }
    content["attr"] = pb.decode_attributes(node.attr)
    return content


def _parse_list(text: str) -> Any:
    try:
        return safe_values.parse_literal(text)
    except ValueError:
        return text
