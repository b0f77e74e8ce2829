"""Chakra execution traces (.et): length-delimited protobuf, plain or gzip, of nodes and their dependencies.

Read: every node with all attribute types, inputs and outputs, data and control dependencies, communication,
process groups; metadata with a version (ASTRA-sim, the generator) or attributes (the PyTorch converter).
A node's type, start, duration and attributes without a column stay in ``nodes.attrs``, with Chakra's names.
Nodes that say when they started are events as well.

Format: mlcommons/chakra schema/protobuf/et_def.proto; [varint length][message] each, GlobalMetadata first.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from etloom.errors import ReadError
from etloom.kinds import collective
from etloom.readers import _chakra_pb as pb
from etloom.readers import _literals
from etloom.readers._files import content
from etloom.readers._nodes import NODE_ATTRIBUTES, Nodes
from etloom.readers._tables import Stat, frame_of, trace_of
from etloom.trace import Trace

_COMM = ("comm_type", "comm_size", "pg_name", "comm_src", "comm_dst")
_TYPES = {name: number for number, name in pb.NODE_TYPES.items()}
_SEND, _RECV, _COLL = _TYPES["COMM_SEND_NODE"], _TYPES["COMM_RECV_NODE"], _TYPES["COMM_COLL_NODE"]
_MAX_VARINT = 10


def sniff(head: bytes) -> bool:
    """Whether the file begins with a Chakra GlobalMetadata message, or with a Node."""
    head = head.removeprefix(b"\0")  # metadata with nothing in it
    try:
        length, at = _varint(head, 0)
    except (IndexError, ValueError):
        return False
    if not length or at >= len(head):
        return False
    if at + length > len(head):  # metadata may hold a whole input file
        return head[at : at + 1] == b"\x12" and b"\x0a\x06schema" in head[at : at + 16]
    message = head[at : at + length]
    if (metadata := _metadata(message)) is not None:
        return bool(metadata.version or metadata.attr) and metadata.version.isprintable()
    return (node := _node(message)) is not None and bool(node.name) and node.type in pb.NODE_TYPES


def read(path: Path, *, limit: int = 4 << 30) -> Trace:
    """The Trace of one rank: nodes, tensors, comms, groups, dependencies; events where nodes have a start.

    limit: the most bytes that the unpacked file may have. Raises ReadError, LimitError.
    A file that was cut off gives the nodes before the cut; the loss is a row of stats.
    """
    data, cut = content(path, limit)
    messages, stats = _messages(data, cut)
    if not messages:
        raise ReadError("holds no Chakra message", where=path)
    metadata = _metadata(messages[0])
    header = {} if metadata is None else {"version": metadata.version, **_attributes(metadata.attr)}
    nodes, groups, damaged = Nodes(), list[dict[str, Any]](), 0
    unread: list[str] = []
    for message in messages[metadata is not None :]:
        node = _node(message)
        if node is None:
            damaged += 1
            continue
        _add(nodes, node, groups, unread)
    if not len(nodes) and metadata is None:
        raise ReadError("is no Chakra execution trace: no message is a node", where=path)
    tables, more = nodes.tables()
    stats += [
        ("read.damaged_node", "data_loss", damaged, "a message that is no Node"),
        ("read.unreadable_values", "info", len(unread), unread[0] if unread else None),
        *more,
    ]
    tables["groups"] = frame_of("groups", groups, stats)
    meta = {
        "formats": ["chakra"],
        "files": [str(path)],
        "clock": "relative",
        "base_ns": 0,
        "schema_version": str(header.get("version") or header.get("schema") or ""),
        "header": header,
    }
    return trace_of(tables, meta, stats)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Raises IndexError where data ends inside it, ValueError where it is too long."""
    value = 0
    for shift in range(_MAX_VARINT):
        byte = data[at + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("a varint of more than ten bytes")


def _messages(data: bytes, cut: str | None) -> tuple[list[memoryview], list[Stat]]:
    view, at = memoryview(data), 0
    found: list[memoryview] = []
    while at < len(data):
        try:
            length, begin = _varint(data, at)
            if begin + length > len(data):
                raise IndexError
        except (IndexError, ValueError):
            example = f"{len(data) - at:,} bytes after message {len(found):,} belong to no whole one"
            return found, [("read.truncated", "data_loss", 1, f"{example}: {cut or 'the end is missing'}")]
        found.append(view[begin : begin + length])
        at = begin + length
    return found, [("read.truncated", "data_loss", 1, cut)] if cut else []


def _metadata(message: bytes | memoryview) -> Any:
    """The GlobalMetadata, or None where the message is something else: a Node is no valid one."""
    try:
        metadata = pb.GlobalMetadata.FromString(bytes(message))
    except DecodeError:
        return None
    size = metadata.ByteSize()
    metadata.DiscardUnknownFields()
    return metadata if metadata.ByteSize() == size else None


def _node(message: bytes | memoryview) -> Any:
    try:
        return pb.Node.FromString(bytes(message))
    except DecodeError:
        return None


def _attributes(attrs: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for attr in attrs:
        kind = attr.WhichOneof("value")
        if kind is None:
            values[attr.name] = None
        else:
            value = getattr(attr, kind)
            values[attr.name] = _plain(list(value.values)) if kind.endswith("_list") else _plain(value)
        if attr.doc_string:
            values[f"{attr.name}.doc_string"] = attr.doc_string
    return values


def _plain(value: Any) -> Any:
    """Bytes as base64 text, which JSON can hold."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _add(nodes: Nodes, node: Any, groups: list[dict[str, Any]], unread: list[str]) -> None:
    attrs = _attributes(node.attr)
    known = {key: attrs.pop(key) for key in NODE_ATTRIBUTES if key in attrs}
    comm = {key: attrs.pop(key) for key in _COMM if key in attrs}
    rest = {"node_type": pb.NODE_TYPES.get(node.type, node.type)}
    if node.start_time_micros:
        rest["start_time_micros"] = node.start_time_micros
    rest["duration_micros"] = node.duration_micros
    parent = _signed(node.ctrl_deps[0]) if node.ctrl_deps else None
    place = nodes.add(_signed(node.id), node.name, parent, known, rest | attrs)
    for io, info in enumerate((node.inputs, node.outputs)):
        texts = (info.values, info.shapes, info.types)
        if not any(texts):
            continue
        try:
            values, shapes, types = (
                _literals.parse(info.values),
                _literals.parse_repeated(info.shapes),
                _literals.parse_repeated(info.types),
            )
            if not all(isinstance(part, list) for part in (values, shapes, types)):
                raise ValueError("no list")
        except ValueError as error:
            unread.append(f"node {node.id}, {('inputs', 'outputs')[io]}: {error}")
            continue
        nodes.arguments(place, io, values, shapes, types, [])
        if io == 0 and "process_group:init" in node.name:
            groups.extend(_groups(values, unread))
    for kind, deps in (("ctrl", node.ctrl_deps), ("data", node.data_deps)):
        nodes.depends(place, map(_signed, deps), kind)
    if node.type in (_SEND, _RECV, _COLL) or "comm_type" in comm or "comm_size" in comm:
        nodes.communicates(place, _comm(node, comm, attrs))
    if node.start_time_micros:
        start = node.start_time_micros * 1000
        nodes.occurs(place, {"ts": start, "dur": node.duration_micros * 1000, **_lane(node, known, attrs)})


def _lane(node: Any, known: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    on_device = attrs.get("is_cpu_op") is False
    stream = attrs.get("stream") if on_device else None
    return {
        "ph": "X",
        "name": node.name,
        "cat": "kernel" if on_device else "cpu_op",
        "tid": stream if on_device else known.get("tid"),
        "stream": stream,
        "device": 0 if on_device else None,
        "rf_id": known.get("rf_id") if not on_device else None,
    }


def _comm(node: Any, comm: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    # An unset comm_type is unknown; read as a number it would be all-reduce.
    kind = comm.get("comm_type")
    named = pb.COLLECTIVES.get(kind) if isinstance(kind, int) else collective(node.name)
    p2p = {_SEND: ("send", "comm_dst"), _RECV: ("recv", "comm_src")}.get(node.type)
    return {
        "collective": p2p[0] if p2p else named,
        "pg_name": str(comm["pg_name"]) if comm.get("pg_name") not in (None, "") else None,
        "peer": comm.get(p2p[1]) if p2p else None,
        "root": attrs.get("root"),
        "is_p2p": p2p is not None,
        # The generator writes the size of a send or receive as tensor_size.
        "bytes": comm.get("comm_size", attrs.get("tensor_size") if p2p else None),
    }


def _groups(values: list[Any], unread: list[str]) -> list[dict[str, Any]]:
    found = []
    for text in values:
        try:
            listed = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError) as error:
            unread.append(f"process groups: {error}")
            continue
        for group in listed if isinstance(listed, list) else []:
            if isinstance(group, dict):
                found.append(
                    {
                        "pg_name": str(group.get("pg_name", "")),
                        "pg_desc": group.get("pg_desc"),
                        "backend": group.get("backend_config"),
                        "ranks": json.dumps(group["ranks"]) if group.get("ranks") else None,
                        "size": group.get("group_size", group.get("pg_size")),
                    }
                )
    return found


def _signed(value: int) -> int:
    """Ids are unsigned on the wire and signed in the tables; wrapping round keeps them distinct."""
    return value - (1 << 64) if value >= 1 << 63 else value
