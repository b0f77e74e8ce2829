"""Chakra execution traces (.et): length-delimited protobuf, plain or gzip, of nodes and their dependencies.

Read: every node with all attribute types, inputs and outputs, data and control dependencies, communication,
process groups; metadata with a version (ASTRA-sim, the generator) or attributes (the PyTorch converter).
A node's type, start, duration and attributes without a column stay in ``nodes.attrs``, with Chakra's names.
Nodes that say when they started are events as well; ``start_ns`` and ``duration_ns``, which etloom writes, say it to
the nanosecond.

Format: mlcommons/chakra schema/protobuf/et_def.proto; [varint length][message] each, GlobalMetadata first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etloom.core.categories import parse_collective
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.chakra import protobuf as pb
from etloom.formats.io import python_literals
from etloom.formats.io.compression import read_content
from etloom.formats.tables.building import build_frame, build_trace
from etloom.formats.tables.node_table import NODE_ATTRIBUTES, NodeTableBuilder

_ATTRIBUTE_OF_COLUMN = {
    "root": "root", "dtype": "dtype", "in_nelems": "in_msg_nelems", "out_nelems": "out_msg_nelems",
    "group_size": "pg_size", "seq": "comm_seq",
}  # fmt: skip
"""Columns of comms and the attributes that PyTorch's execution trace, or etloom, calls them by."""
_COMM_ATTRIBUTES = ("comm_type", "comm_size", "pg_name", "comm_src", "comm_dst")
_SEND, _RECV, _COLL = (
    pb.TYPE_NUMBERS["COMM_SEND_NODE"],
    pb.TYPE_NUMBERS["COMM_RECV_NODE"],
    pb.TYPE_NUMBERS["COMM_COLL_NODE"],
)


def sniff(head: bytes) -> bool:
    """Whether the file begins with a Chakra GlobalMetadata message, or with a Node."""
    head = head.removeprefix(b"\0")  # metadata with nothing in it
    try:
        length, at = pb.decode_varint(head, 0)
    except (IndexError, ValueError):
        return False
    if not length or at >= len(head):
        return False
    if at + length > len(head):  # metadata may hold a whole input file
        return head[at : at + 1] == b"\x12" and b"\x0a\x06schema" in head[at : at + 16]
    message = head[at : at + length]
    if (metadata := pb.parse_metadata(message)) is not None:
        return bool(metadata.version or metadata.attr) and metadata.version.isprintable()
    return (node := pb.parse_node(message)) is not None and bool(node.name) and node.type in pb.NODE_TYPES


def read(path: Path, *, limit: int = 4 << 30) -> Trace:
    """The Trace of one rank: nodes, tensors, comms, groups, dependencies; events where nodes have a start.

    limit: the most bytes that the unpacked file may have. Raises ReadError, LimitError.
    A file that was cut off gives the nodes before the cut; the loss is a row of stats.
    """
    data, cut = read_content(path, limit)
    messages, stats = pb.split_messages(data, cut)
    if not messages:
        raise ReadError("holds no Chakra message", where=path)
    metadata = pb.parse_metadata(messages[0])
    header = {} if metadata is None else {"version": metadata.version, **pb.decode_attributes(metadata.attr)}
    nodes, groups, damaged = NodeTableBuilder(), list[dict[str, Any]](), 0
    unread: list[str] = []
    untimed: list[str] = []
    for message in messages[metadata is not None :]:
        node = pb.parse_node(message)
        if node is None:
            damaged += 1
            continue
        _add_node(nodes, node, groups, unread, untimed)
    if not len(nodes) and metadata is None:
        raise ReadError("is no Chakra execution trace: no message is a node", where=path)
    tables, more = nodes.tables()
    stats += [
        Stat("read.damaged_node", "data_loss", damaged, "a message that is no Node"),
        Stat("read.unreadable_values", "info", len(unread), unread[0] if unread else None),
        Stat("read.no_time", "data_loss", len(untimed), untimed[0] if untimed else None),
        *more,
    ]
    tables["groups"] = build_frame("groups", groups, stats)
    meta = {
        "formats": ["chakra"],
        "files": [str(path)],
        "clock": "epoch" if header.get("clock") == "epoch" else "relative",
        "base_ns": 0,
        **{key: header[key] for key in ("rank", "world_size") if isinstance(header.get(key), int)},
        "schema_version": str(header.get("version") or header.get("schema") or ""),
        "header": header,
    }
    return build_trace(tables, meta, stats)


def _add_node(
    nodes: NodeTableBuilder, node: Any, groups: list[dict[str, Any]], unread: list[str], untimed: list[str]
) -> None:
    attrs = pb.decode_attributes(node.attr)
    known = {key: attrs.pop(key) for key in NODE_ATTRIBUTES if key in attrs}
    comm = {key: attrs.pop(key) for key in _COMM_ATTRIBUTES if key in attrs}
    rest = {"node_type": pb.NODE_TYPES.get(node.type, node.type)}
    if node.start_time_micros:
        rest["start_time_micros"] = node.start_time_micros
    rest["duration_micros"] = node.duration_micros
    parent = _to_signed(node.ctrl_deps[0]) if node.ctrl_deps else None
    place = nodes.add(_to_signed(node.id), node.name, parent, known, rest | attrs)
    for io, info in enumerate((node.inputs, node.outputs)):
        texts = (info.values, info.shapes, info.types)
        if not any(texts):
            continue
        try:
            values, shapes, types = (
                python_literals.parse_literal(info.values),
                python_literals.parse_cached_literal(info.shapes),
                python_literals.parse_cached_literal(info.types),
            )
            if not all(isinstance(part, list) for part in (values, shapes, types)):
                raise ValueError("no list")
        except ValueError as error:
            unread.append(f"node {node.id}, {('inputs', 'outputs')[io]}: {error}")
            continue
        nodes.arguments(place, io, values, shapes, types, [])
        if io == 0 and "process_group:init" in node.name:
            groups.extend(_parse_groups(values, unread))
    for kind, deps in (("ctrl", node.ctrl_deps), ("data", node.data_deps)):
        nodes.add_dependencies(place, map(_to_signed, deps), kind)
    if node.type in (_SEND, _RECV, _COLL) or "comm_type" in comm or "comm_size" in comm:
        nodes.add_comm(place, _describe_communication(node, comm, attrs))
    start, duration = attrs.get("start_ns"), attrs.get("duration_ns")
    if node.start_time_micros or start is not None:
        start = node.start_time_micros * 1000 if start is None else start
        duration = node.duration_micros * 1000 if duration is None else duration
        if not isinstance(start, int) or not -(1 << 63) <= start < 1 << 63:
            untimed.append(f"node {node.id}: its start is no time: {start}")
            return
        nodes.add_event(place, {"ts": start, "dur": duration, **_describe_track(node, known, attrs)})


def _describe_track(node: Any, known: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    on_device = attrs.get("is_cpu_op") is False
    stream = attrs.get("stream") if on_device else None
    return {
        "ph": "X",
        "name": node.name,
        "cat": attrs.get("cat", "kernel" if on_device else "cpu_op"),
        "tid": stream if on_device else known.get("tid"),
        "stream": stream,
        "device": attrs.get("device", 0) if on_device else None,
        "rf_id": known.get("rf_id") if not on_device else None,
    }


def _describe_communication(node: Any, comm: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    # An unset comm_type is unknown; read as a number it would be all-reduce.
    kind = comm.get("comm_type")
    named = pb.COLLECTIVES.get(kind) if isinstance(kind, int) else parse_collective(node.name)
    p2p = {_SEND: ("send", "comm_dst"), _RECV: ("recv", "comm_src")}.get(node.type)
    return {
        "collective": p2p[0] if p2p else named,
        "pg_name": str(comm["pg_name"]) if comm.get("pg_name") not in (None, "") else None,
        "peer": comm.get(p2p[1]) if p2p else None,
        **{column: attrs.get(name) for column, name in _ATTRIBUTE_OF_COLUMN.items()},
        "is_p2p": p2p is not None,
        # The generator writes the size of a send or receive as tensor_size.
        "bytes": comm.get("comm_size", attrs.get("tensor_size") if p2p else None),
    }


def _parse_groups(values: list[Any], unread: list[str]) -> list[dict[str, Any]]:
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


def _to_signed(value: int) -> int:
    """Ids are unsigned on the wire and signed in the tables; wrapping round keeps them distinct."""
    return value - (1 << 64) if value >= 1 << 63 else value
