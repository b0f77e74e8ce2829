"""Chakra execution traces (.et): length-delimited protobuf, plain or gzip, with nodes and their dependencies.

Supported: nodes with all attribute types, inputs and outputs, data and control dependencies, communication, process
groups; metadata with a version (ASTRA-sim, the generator) or attributes (the PyTorch converter). Type, start, duration
and attributes of a node without a column are stored in ``nodes.attrs`` under Chakra's names. Nodes with a start time
are events as well; ``start_ns`` and ``duration_ns``, which etloom writes, give it in nanoseconds.

Format: mlcommons/chakra schema/protobuf/et_def.proto; [varint length][message] each, GlobalMetadata first. The JSON of
its feeder ({"workload_graph": [...]}) is read, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.categories import parse_collective
from etloom.core.errors import ReadError
from etloom.core.schema import TABLES, TIME_LIMIT, Stat
from etloom.core.trace import Trace
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra import workload_json
from etloom.formats.io import safe_values
from etloom.formats.io.compression import SizeLimit, read_content
from etloom.formats.io.json_text import load_json
from etloom.formats.io.limits import check_rows
from etloom.formats.tables.building import build_frame, build_trace
from etloom.formats.tables.node_table import NODE_ATTRIBUTES, NodeTableBuilder

_COLUMN_ATTRIBUTES = {
    "root": "root", "dtype": "dtype", "in_nelems": "in_msg_nelems", "out_nelems": "out_msg_nelems",
    "group_size": "pg_size", "seq": "comm_seq",
}  # fmt: skip
"""Columns of comms and their attributes in PyTorch's execution trace, or etloom's."""
_COMM_ATTRIBUTES = ("comm_type", "comm_size", "pg_name", "comm_src", "comm_dst")
_SEND, _RECV, _COLL = (pb.TYPE_NUMBERS[f"COMM_{kind}_NODE"] for kind in ("SEND", "RECV", "COLL"))
_MAX_INT64 = (1 << 63) - 1
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


def sniff(head: bytes) -> bool:
    """Return whether the file starts with a Chakra GlobalMetadata or Node message, or is a workload JSON."""
    if workload_json.is_workload(head):
        return True
    if not _CONTROL_CHARACTER.search(head[:4096]):  # text; protobuf's tags are control characters
        return False
    head = head.removeprefix(b"\0")  # empty metadata
    try:
        length, start = pb.decode_varint(head, 0)
    except (IndexError, ValueError):
        return False
    if not length or start >= len(head):
        return False
    if start + length > len(head):  # metadata may contain a complete input file
        return head[start : start + 1] == b"\x12" and b"\x0a\x06schema" in head[start : start + 16]
    message = head[start : start + length]
    if (metadata := pb.parse_metadata(message)) is not None:
        return bool(metadata.version or metadata.attr) and metadata.version.isprintable()
    return (node := pb.parse_node(message)) is not None and bool(node.name) and node.type in pb.NODE_TYPES


def read(path: Path, *, limit: SizeLimit = 4 << 30) -> Trace:
    """Read a .et file as the Trace of one rank: nodes, tensors, comms, groups, dependencies, events of timed nodes.

    Of a truncated file, the nodes before the cut are read, and the loss is a row of stats.

    Raises:
        ReadError: The file is not a Chakra execution trace.
        LimitError: It is larger than ``limit``.
    """
    data, truncation = read_content(path, limit)
    if workload_json.is_workload(data):
        data = workload_json.encode_workload(data, path)
    messages, stats = pb.split_messages(data, truncation)
    check_rows(len(messages), path)
    if not messages:
        raise ReadError("contains no Chakra message", where=path)
    metadata = pb.parse_metadata(messages[0])
    header = {} if metadata is None else {"version": metadata.version, **pb.decode_attributes(metadata.attr)}
    builder, damaged = _TraceBuilder(), 0
    for message in messages[metadata is not None :]:
        if (node := pb.parse_node(message)) is None:
            damaged += 1
        else:
            builder.add(node)
    if not len(builder.nodes) and metadata is None:
        raise ReadError("not a Chakra execution trace: no message is a node", where=path)
    stats.append(Stat("read.damaged_node", "data_loss", damaged, "a message that cannot be parsed as a Node"))
    meta = {
        "formats": ["chakra"],
        "files": [str(path)],
        "clock": "epoch" if header.get("clock") == "epoch" else "relative",
        "base_ns": 0,
        **{key: header[key] for key in ("rank", "world_size") if isinstance(header.get(key), int)},
        "schema_version": str(header.get("version") or header.get("schema") or ""),
        "header": header,
    }
    return build_trace(builder.build_tables(stats), meta, stats)


class _TraceBuilder:
    """Collects the rows of all tables from Node messages, and examples of values that cannot be read."""

    def __init__(self) -> None:
        self.nodes = NodeTableBuilder()
        self._groups: list[dict[str, Any]] = []
        self._unreadable: list[str] = []
        self._invalid_times: list[str] = []
        self._parts: list[int] = []

    def add(self, node: Any) -> None:
        """Convert a Node message to rows of all tables (nodes, tensors, comms, ...) and collect these rows."""
        attrs = pb.decode_attributes(node.attr)
        standard = {key: attrs.pop(key) for key in NODE_ATTRIBUTES if key in attrs}
        comm = {key: attrs.pop(key) for key in _COMM_ATTRIBUTES if key in attrs}
        rest = {"node_type": pb.NODE_TYPES.get(node.type, node.type)}
        if node.start_time_micros:
            rest["start_time_micros"] = node.start_time_micros
        rest["duration_micros"] = node.duration_micros
        parent = _to_signed(node.ctrl_deps[0]) if node.ctrl_deps else None
        row = self.nodes.add(_to_signed(node.id), node.name, parent, standard, rest | attrs)
        for io, arguments in enumerate((node.inputs, node.outputs)):
            if arguments.values or arguments.shapes or arguments.types:
                self._add_arguments(row, node, io, arguments)
        for kind, dependencies in (("ctrl", node.ctrl_deps), ("data", node.data_deps)):
            self.nodes.add_dependencies(row, map(_to_signed, dependencies), kind)
        is_communication = node.type in (_SEND, _RECV, _COLL) or "comm_type" in comm or "comm_size" in comm
        # etloom writes delays of streams as broadcasts without a collective, see exports.chakra.communication_nodes.
        if is_communication and not (attrs.get("replayed") and "collective" not in attrs):
            self.nodes.add_comm(row, _describe_communication(node, comm, attrs))
        if node.start_time_micros or attrs.get("start_ns") is not None:
            self._add_event(row, node, standard, attrs)

    def _add_arguments(self, row: int, node: Any, io: int, arguments: Any) -> None:
        """Add a node's inputs (io 0) or outputs (io 1); for a process_group:init node, also its process groups."""
        try:
            values = safe_values.parse_literal(arguments.values)
            shapes = safe_values.parse_cached_literal(arguments.shapes)
            types = safe_values.parse_cached_literal(arguments.types)
            if not all(isinstance(part, list) for part in (values, shapes, types)):
                raise ValueError("not a list")
        except ValueError as error:
            self._unreadable.append(f"node {node.id}, {('inputs', 'outputs')[io]}: {error}")
            return
        self.nodes.add_arguments(row, io, values, shapes, types, [])
        if io == 0 and "process_group:init" in node.name:
            for text in values:
                self._add_groups(text)

    def _add_groups(self, text: Any) -> None:
        try:
            groups = load_json(text) if isinstance(text, str) else None
        except (ValueError, RecursionError) as error:
            self._unreadable.append(f"process groups: {error}")
            return
        self._groups += [
            {
                "pg_name": str(group.get("pg_name", "")),
                "pg_desc": group.get("pg_desc"),
                "backend": group.get("backend_config"),
                "ranks": json.dumps(group["ranks"]) if group.get("ranks") else None,
                "size": group.get("group_size", group.get("pg_size")),
            }
            for group in (groups if isinstance(groups, list) else [])
            if isinstance(group, dict)
        ]

    def _add_event(self, row: int, node: Any, standard: dict[str, Any], attrs: dict[str, Any]) -> None:
        """Add a node's event; an operator that etloom split into parts becomes one event of the full duration."""
        if attrs.get("part"):
            self._parts.append(row)
            return
        start, duration = attrs.get("start_ns"), attrs.get("inclusive_ns", attrs.get("duration_ns"))
        start = node.start_time_micros * 1000 if start is None else start
        duration = node.duration_micros * 1000 if duration is None else duration
        if not isinstance(start, int) or not abs(start) <= TIME_LIMIT:
            self._invalid_times.append(f"node {node.id}: invalid start time {start}")
            return
        self.nodes.add_event(row, {"ts": start, "dur": duration, **_describe_track(node, standard, attrs)})

    def build_tables(self, stats: list[Stat]) -> dict[str, pl.DataFrame]:
        """Build all tables from the collected rows; report values that cannot be read as rows of stats."""
        tables, node_stats = self.nodes.build_tables()
        for name, severity, examples in (
            ("read.unreadable_values", "info", self._unreadable),
            ("read.no_time", "data_loss", self._invalid_times),
        ):
            stats.append(Stat(name, severity, len(examples), examples[0] if examples else None))
        stats += node_stats
        tables["groups"] = build_frame("groups", self._groups, stats)
        if "events" in tables:
            tables["links"] = self._link_parts(tables)
            tables["launches"] = _find_launching_operators(tables)
        return tables

    def _link_parts(self, tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
        """Add links (node, event) from the later parts of a split operator to the event of its first part."""
        links = tables["links"]
        is_part = pl.col("file_order").is_in(self._parts)
        parts = tables["nodes"].filter(is_part).select(pl.col("id").alias("part"), node="parent")
        linked = parts.join(links, on="node").drop("node").rename({"part": "node"})
        return pl.concat([links, linked.select(links.columns)]).sort("node")


def _find_launching_operators(tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Build the launches table (operator, device_event) of GPU activities whose parent node is an operator."""
    events, nodes, links = tables["events"], tables["nodes"], tables["links"].select("node", "event")
    on_device = events.filter(pl.col("device").is_not_null()).select(event="id")
    launched = links.join(on_device, on="event").join(nodes.select(node="id", cause="parent"), on="node")
    operators = events.filter(pl.col("cat") == "cpu_op").select(operator="id")
    found = (
        launched.join(links.select(cause="node", operator="event"), on="cause")
        .join(operators, on="operator")
        .select("operator", device_event="event")
    )
    return TABLES["launches"].conform(found.sort("device_event"))


def _describe_track(node: Any, standard: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """Build the columns of a node's event that give its name, category, thread, stream, device and rf_id."""
    on_device = attrs.get("is_cpu_op") is False
    stream = attrs.get("stream") if on_device else None
    return {
        "ph": "X",
        "name": node.name,
        "cat": attrs.get("cat", "kernel" if on_device else "cpu_op"),
        "tid": stream if on_device else standard.get("tid"),
        "stream": stream,
        "device": attrs.get("device", 0) if on_device else None,
        "rf_id": standard.get("rf_id") if not on_device else None,
    }


def _describe_communication(node: Any, comm: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """Build a row of the comms table from a communication node and its attributes."""
    # An unset comm_type is unknown; as a number it would be an all-reduce.
    comm_type = comm.get("comm_type")
    collective = pb.COLLECTIVES.get(comm_type) if isinstance(comm_type, int) else parse_collective(node.name)
    if attrs.get("replayed"):
        collective, comm = attrs.get("collective"), {}
    p2p = {_SEND: ("send", "comm_dst"), _RECV: ("recv", "comm_src")}.get(node.type)
    return {
        "collective": p2p[0] if p2p else collective,
        "pg_name": str(comm["pg_name"]) if comm.get("pg_name") not in (None, "") else None,
        "peer": comm.get(p2p[1]) if p2p else None,
        **{column: attrs.get(name) for column, name in _COLUMN_ATTRIBUTES.items()},
        "is_p2p": p2p is not None,
        # The generator writes the size of a send or receive as tensor_size.
        "bytes": comm.get("comm_size", attrs.get("tensor_size") if p2p else None),
    }


def _to_signed(value: int) -> int:
    """Convert an unsigned 64-bit id of the file to the signed 64-bit id of the tables, by two's complement."""
    return value - (1 << 64) if value > _MAX_INT64 else value


def recorded_duration_ns() -> pl.Expr:
    """Return a polars expression on the nodes table: the duration (ns) that a Chakra node records, or null."""
    text = pl.col("attrs").cast(pl.String).str.json_path_match("$.duration_micros")
    return 1000 * text.cast(pl.Int64, strict=False)
