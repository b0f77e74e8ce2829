"""A Chakra file as one JSON object: what the messages hold, by the names of the schema.

    {"metadata": {"version": "0.0.4", "attr": {"rank": 0}},
     "nodes": [{"id": 1, "name": "aten::mm", "type": "COMP_NODE", "ctrl_deps": [], "data_deps": [], ...,
                "inputs": {"values": [...], "shapes": [...], "types": [...]}, "attr": {"is_cpu_op": true}}]}

Numbers are numbers, of any size. Inputs and outputs, which the file has as text in Python's spelling, are lists; a text
that is no list of plain values stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from etloom.formats.chakra import protobuf as pb
from etloom.formats.io import python_literals
from etloom.formats.tables.node_table import to_json


def format_lines(metadata: Any, nodes: Iterable[Any]) -> Iterator[bytes]:
    """The object in pieces, a node to a line. metadata: a GlobalMetadata or None; nodes: Node messages."""
    said = (
        {} if metadata is None else {"version": metadata.version, "attr": pb.decode_attributes(metadata.attr)}
    )
    yield f'{{"metadata": {to_json(said)},\n"nodes": ['.encode()
    separator = "\n"
    for node in nodes:
        yield (separator + to_json(_to_dict(node))).encode()
        separator = ",\n"
    yield b"\n]}\n"


def _to_dict(node: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": node.id,
        "name": node.name,
        "type": pb.NODE_TYPES.get(node.type, node.type),
        "ctrl_deps": list(node.ctrl_deps),
        "data_deps": list(node.data_deps),
        "start_time_micros": node.start_time_micros,
        "duration_micros": node.duration_micros,
    }
    for name, side in (("inputs", node.inputs), ("outputs", node.outputs)):
        if side.values or side.shapes or side.types:
            found[name] = {part: _parse_list(getattr(side, part)) for part in ("values", "shapes", "types")}
    found["attr"] = pb.decode_attributes(node.attr)
    return found


def _parse_list(text: str) -> Any:
    try:
        return python_literals.parse_literal(text)
    except ValueError:
        return text
