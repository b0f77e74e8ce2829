"""Reads ET+ files: execution traces that also contain the times of operators and the GPU work that they launched.

Supported: files of chakra_trace_link and of etloom, with schema and header; host nodes with ``ts``, ``inclusive_dur``
and ``exclusive_dur`` (microseconds on the profiler's clock), ``inter_thread_dep`` and ``sync_dep``; device nodes with
``cat``, ``ts``, ``stream``, ``pg_name``. A node with a time becomes a node, an event and a link between the two. The
``ctrl_deps`` of a device node is its operator, which makes a row of launches.

chakra_trace_link's device nodes are copies of their operator's node with some members replaced: inputs, rf_id and
thread are the operator's and are ignored, except by a communication, which they describe.
The thread of a host event is the recorder's thread number, the only one in an ET+. Of a truncated file, the complete
nodes are read.
"""

from __future__ import annotations

import contextlib
import json
import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.categories import DEVICE_CATEGORIES, parse_collective
from etloom.core.errors import ReadError
from etloom.core.schema import TABLES, TIME_LIMIT, Stat
from etloom.core.trace import Trace
from etloom.formats.execution_trace.communication import COMM_RECORD, describe_record
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, SizeLimit, read_chunks, read_content
from etloom.formats.tables.building import build_trace
from etloom.formats.tables.node_table import NODE_ATTRIBUTES, NodeTableBuilder

_NODE_LIST_PATTERN = re.compile(r'"nodes"\s*:\s*\[')
_NODE_PATTERN = re.compile(r'\{\s*"id"\s*:')
_TIME_PATTERN = re.compile(rb'"(?:in|ex)clusive_dur"\s*:')
_LONGEST_MATCH = 64
_OBSERVER_HEAD = re.compile(rb'\{\s*\n\s*"schema": "[^"]*", "pid": ')
"""The layout of torch's observer, whose files have no times; every JSON writer breaks lines at all members or none."""
_TIME_MEMBERS = {"ts", "inclusive_dur", "exclusive_dur"}
_COLUMN_MEMBERS = {"id", "name", "ctrl_deps", "inputs", "outputs", "attrs", "cat", "ph", "stream", "pg_name"}
_DEPENDENCY_MEMBERS = {"inter_thread_dep", "sync_dep"}
_INTERPRETED_MEMBERS = _TIME_MEMBERS | _COLUMN_MEMBERS | _DEPENDENCY_MEMBERS
_USER_SCOPE = 7
_EPOCH_NS = 10**18
"""Times above this count from 1970 (it is in 2001); smaller ones count from the start of the session."""


def sniff(head: bytes) -> bool:
    """Return whether the file is an ET+: an execution trace whose nodes have inclusive or exclusive durations."""
    return (
        b'"schema"' in head
        and b'"nodes"' in head
        and (b'"inclusive_dur"' in head or b'"exclusive_dur"' in head)
    )


def is_in(path: Path) -> bool:
    """Return whether any node of an execution trace has a duration; reads up to the first one, or the whole file."""
    status = path.stat()
    return _search_times(path.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _search_times(path: Path, size: int, mtime_ns: int) -> bool:
    """Search a file for durations; the size and the time of the last change identify the content for the cache."""
    before = b""
    with contextlib.suppress(*DECOMPRESSION_ERRORS):
        for piece in read_chunks(path):
            if not before and _OBSERVER_HEAD.match(piece):
                return False
            if _TIME_PATTERN.search(before + piece):
                return True
            before = (before + piece)[-_LONGEST_MATCH:]
    return False


def read(path: Path, *, limit: SizeLimit = 2 << 30) -> Trace:
    """Read an ET+ file as the Trace of one rank: nodes, tensors, comms, events, links, launches, dependencies.

    Raises:
        ReadError: The file is not an ET+.
        LimitError: It is larger than ``limit``.
    """
    data, truncation = read_content(path, limit)
    header, nodes, stats = _parse_file(data, truncation, path)
    builder, damaged = NodeTableBuilder(), 0
    for node in nodes:
        if isinstance(node, dict) and isinstance(node.get("id"), int):
            _add_node(builder, node, header.get("pid"))
        else:
            damaged += 1
    stats.append(Stat("read.damaged_node", "data_loss", damaged, "a node without an id"))
    tables, node_stats = builder.build_tables()
    stats += node_stats
    tables["launches"] = _build_launches(tables)
    first = tables["events"]["ts"].min() if "events" in tables else None
    meta = {
        "formats": ["etplus"],
        "files": [str(path)],
        "clock": "epoch" if isinstance(first, int) and first > _EPOCH_NS else "relative",
        "base_ns": 0,
        "schema_version": header.get("schema"),
        "header": {key: value for key, value in header.items() if key != "schema"},
    }
    return build_trace(tables, meta, stats)


class _ExactNumber(float):
    """A JSON number that retains its text, because microseconds since 1970 need more digits than a float has."""

    text: str

    def __new__(cls, text: str) -> _ExactNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number


def _parse_file(
    data: bytes, truncation: str | None, path: Path
) -> tuple[dict[str, Any], list[Any], list[Stat]]:
    """Parse the file to header, nodes and stats; if its JSON is incomplete, read it node by node and count lost nodes.

    Raises:
        ReadError: There is no list of nodes, or the JSON is nested too deeply.
    """
    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder(parse_float=_ExactNumber)
    try:
        document = decoder.decode(text)
    except RecursionError:
        raise ReadError("the JSON is nested too deeply", where=path) from None
    except json.JSONDecodeError as error:
        return _parse_fragments(text, decoder, truncation or f"line {error.lineno}: {error.msg}", path)
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise ReadError("not an ET+: it has no list of nodes", where=path)
    return {key: value for key, value in document.items() if key != "nodes"}, document["nodes"], []


def _parse_fragments(
    text: str, decoder: json.JSONDecoder, reason: str, path: Path
) -> tuple[dict[str, Any], list[Any], list[Stat]]:
    """Return header, complete nodes and stats of a damaged file; ``reason`` explains why the text is not JSON."""
    start = _NODE_LIST_PATTERN.search(text)
    if start is None:
        raise ReadError(f"not valid JSON, and without a list of nodes: {reason}", where=path)
    try:
        header = decoder.decode(text[: start.start()].rstrip().rstrip(",") + "}")
    except (json.JSONDecodeError, RecursionError):
        header = {}
    nodes: list[Any] = []
    losses, position = 0, start.end()
    while begin := _NODE_PATTERN.search(text, position):
        try:
            node, position = decoder.raw_decode(text, begin.start())
            nodes.append(node)
        except (json.JSONDecodeError, RecursionError):
            losses += 1
            position = begin.end()
    example = f"{reason}: {len(nodes):,} complete nodes were read"
    return header, nodes, [Stat("read.truncated", "data_loss", max(losses, 1), example)]


def _to_ns(microseconds: Any) -> int | None:
    """Convert a JSON number of microseconds to ns without rounding errors; None for anything that is not a time."""
    ns: int | None = None
    if isinstance(microseconds, _ExactNumber):
        with contextlib.suppress(InvalidOperation, OverflowError):
            ns = int((Decimal(microseconds.text) * 1000).to_integral_value())
    elif isinstance(microseconds, int) and not isinstance(microseconds, bool):
        ns = microseconds * 1000
    return ns if ns is not None and abs(ns) <= TIME_LIMIT else None


def _is_device_node(node: dict[str, Any]) -> bool:
    return isinstance(node.get("cat"), str) and node["cat"] in DEVICE_CATEGORIES


def _add_node(builder: NodeTableBuilder, node: dict[str, Any], pid: Any) -> None:
    """Convert a node of the file to rows of all tables and add them; ``pid`` is the process id of host events."""
    attr_list = node.get("attrs")
    attrs = {
        attr["name"]: attr.get("value")
        for attr in (attr_list if isinstance(attr_list, list) else [])
        if isinstance(attr, dict) and isinstance(attr.get("name"), str)
    }
    on_device = _is_device_node(node)
    columns = {} if on_device else {key: attrs.pop(key) for key in NODE_ATTRIBUTES if key in attrs}
    rest = {key: value for key, value in node.items() if key not in _INTERPRETED_MEMBERS}
    if on_device:
        rest |= {"is_cpu_op": False, "cat": node["cat"], "stream": node.get("stream")}
    else:
        rest |= attrs
    if (exclusive := _to_ns(node.get("exclusive_dur"))) is not None:
        rest["exclusive_dur_ns"] = exclusive
    parent = node.get("ctrl_deps")
    parent = parent if isinstance(parent, int) else None
    name = str(node.get("name", ""))
    row = builder.add(node["id"], name, parent, columns, rest)
    if not on_device:
        _add_arguments(builder, row, node)
    _add_dependencies(builder, row, node, parent)
    if comm := _describe_node(node, attrs, name, on_device=on_device):
        builder.add_comm(row, comm)
    if (ts := _to_ns(node.get("ts"))) is not None:
        event = {"ts": ts, "dur": _to_ns(node.get("inclusive_dur")), "name": name}
        event |= _describe_track(node, columns) | ({} if on_device else {"pid": pid})
        builder.add_event(row, event)


def _add_arguments(builder: NodeTableBuilder, row: int, node: dict[str, Any]) -> None:
    for io, member in enumerate(("inputs", "outputs")):
        arguments = node.get(member)
        if isinstance(arguments, dict):
            parts = [arguments.get(key) or [] for key in ("values", "shapes", "types", "strides")]
            if all(isinstance(part, list) for part in parts):
                builder.add_arguments(row, io, *parts)


def _add_dependencies(builder: NodeTableBuilder, row: int, node: dict[str, Any], parent: int | None) -> None:
    if parent is not None and parent != node["id"]:
        builder.add_dependencies(row, [parent], "ctrl")
    if isinstance(dependency := node.get("inter_thread_dep"), int):
        builder.add_dependencies(row, [dependency], "thread")
    sync = node.get("sync_dep")
    dependencies = sync if isinstance(sync, list) else [sync]
    builder.add_dependencies(row, [id for id in dependencies if isinstance(id, int)], "sync")


def _describe_node(
    node: dict[str, Any], attrs: dict[str, Any], name: str, *, on_device: bool
) -> dict[str, Any]:
    """Build a row of the comms table from a node; empty if the node is not a communication.

    The device node of a communication has the attributes and inputs of its record, named since schema 1.1.0 and
    positional before.
    """
    collective = parse_collective(name)
    if not (
        ("pg_name" in node or collective) if on_device else name == COMM_RECORD or "collective_name" in attrs
    ):
        return {}
    row = (
        _describe_communication(attrs) if "collective_name" in attrs else describe_record(node.get("inputs"))
    )
    recorded = parse_collective(str(row.get("collective")))
    if not on_device:
        return {**row, "collective": recorded}
    # The kernel of sends, receives and all-to-alls does not say which; its record does.
    kind = recorded if collective in (None, "send_recv") and recorded else collective
    group = node.get("pg_name") or row.get("pg_name")
    return {**row, "collective": kind, "pg_name": group}


def _describe_communication(attrs: dict[str, Any]) -> dict[str, Any]:
    """Build a row of the comms table from the named attributes of a node."""
    return {
        "collective": parse_collective(str(attrs["collective_name"])),
        "pg_name": attrs.get("pg_name"),
        "pg_desc": attrs.get("pg_desc"),
        "group_size": attrs.get("pg_size"),
        "dtype": attrs.get("dtype"),
        "in_nelems": attrs.get("in_msg_nelems"),
        "out_nelems": attrs.get("out_msg_nelems"),
        "in_split": attrs.get("in_split_size") or None,
        "out_split": attrs.get("out_split_size") or None,
    }


def _describe_track(node: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Build the columns of an event that give its category and its thread or stream."""
    if _is_device_node(node):
        return {"ph": "X", "cat": node["cat"], "tid": node.get("stream"), "stream": node.get("stream")}
    return {
        "ph": "X",
        "cat": "user_annotation" if columns.get("scope") == _USER_SCOPE else "cpu_op",
        "tid": columns.get("tid"),
        "rf_id": columns.get("rf_id"),
        "seq_id": columns.get("seq_id") if columns.get("seq_id") != -1 else None,
    }


def _build_launches(tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Build the launches table: each GPU event with the operator that launched it (an ET+ has no launch calls)."""
    if "events" not in tables:
        return TABLES["launches"].empty()
    work = tables["events"].filter(pl.col("cat").is_in(sorted(DEVICE_CATEGORIES)))
    links = tables["links"].select("node", "event")
    operators = links.rename({"node": "parent", "event": "operator"})
    parents = tables["nodes"].select(node="id", parent="parent")
    linked_work = links.join(work.select(event="id"), on="event", how="semi").join(
        parents, on="node", how="left"
    )
    return (
        linked_work.join(operators, on="parent", how="left")
        .select(device_event="event", operator="operator")
        .sort("device_event")
    )
