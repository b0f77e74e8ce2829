"""ET+: an execution trace with the times of its operators and the device work that they launched.

Read: what chakra_trace_link writes and what etloom exports: schema and header; host nodes with ``ts``,
``inclusive_dur`` and ``exclusive_dur`` (microseconds on the profiler's clock), ``inter_thread_dep`` and
``sync_dep``; device nodes with ``cat``, ``ts``, ``stream``, ``pg_name``. A node with a time is a node, an event
and a link between the two; a device node hangs on its operator by ``ctrl_deps``, which makes a row of launches.

A device node is a copy of its operator's with some fields overwritten: its inputs, rf_id and thread are the
operator's and are left out. A host event lies on the recorder's thread number, the only one that ET+ keeps.
A file that was cut off gives its whole nodes.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.categories import DEVICE_CATEGORIES, parse_collective
from etloom.core.errors import ReadError
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.formats.io.compression import read_content
from etloom.formats.tables.building import build_trace
from etloom.formats.tables.node_table import NODE_ATTRIBUTES, NodeTableBuilder

_NODE_LIST_PATTERN = re.compile(r'"nodes"\s*:\s*\[')
_NODE_PATTERN = re.compile(r'\{\s*"id"\s*:')
_TIME_MEMBERS = ("ts", "inclusive_dur", "exclusive_dur")
_KNOWN_MEMBERS = {"id", "name", "ctrl_deps", "inputs", "outputs", "attrs", "cat", "ph", "stream", "pg_name"}
_DEPENDENCY_MEMBERS = {"inter_thread_dep", "sync_dep"}
_USER_SCOPE = 7
_EPOCH_NS = 10**18
"""A time after 2001, which no clock relative to a session reaches."""


def sniff(head: bytes) -> bool:
    """Whether the file is an execution trace with times. To be asked before the reader of those without."""
    return (
        b'"schema"' in head
        and b'"nodes"' in head
        and (b'"inclusive_dur"' in head or b'"exclusive_dur"' in head)
    )


def read(path: Path, *, limit: int = 2 << 30) -> Trace:
    """The Trace of one rank: nodes, tensors, comms, events, links, launches, dependencies.

    limit: the most bytes that the unpacked file may have. Raises ReadError, LimitError.
    """
    data, cut = read_content(path, limit)
    header, listed, stats = _parse_file(data, cut, path)
    nodes, skipped = NodeTableBuilder(), 0
    for node in listed:
        if isinstance(node, dict) and isinstance(node.get("id"), int):
            _add_node(nodes, node, header.get("pid"))
        else:
            skipped += 1
    stats.append(Stat("read.damaged_node", "data_loss", skipped, "a node without an id"))
    tables, more = nodes.build_tables()
    stats += more
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
    """A JSON number with its text: microseconds since 1970 need more digits than a float has."""

    text: str

    def __new__(cls, text: str) -> _ExactNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number


def _parse_file(data: bytes, cut: str | None, path: Path) -> tuple[dict[str, Any], list[Any], list[Stat]]:
    """header, nodes. A file that is no whole JSON is read node by node. Raises ReadError."""
    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder(parse_float=_ExactNumber)
    try:
        whole = decoder.decode(text)
        if isinstance(whole, dict) and isinstance(whole.get("nodes"), list):
            return {key: value for key, value in whole.items() if key != "nodes"}, whole["nodes"], []
        raise ReadError("is no ET+: it has no list of nodes", where=path)
    except RecursionError:
        raise ReadError("is nested too deeply", where=path) from None
    except json.JSONDecodeError as error:
        complaint = cut or f"line {error.lineno}: {error.msg}"
    start = _NODE_LIST_PATTERN.search(text)
    if start is None:
        raise ReadError(f"is no whole JSON, and has no list of nodes: {complaint}", where=path)
    try:
        header = decoder.decode(text[: start.start()].rstrip().rstrip(",") + "}")
    except (json.JSONDecodeError, RecursionError):
        header = {}
    found: list[Any] = []
    losses, at = 0, start.end()
    while begin := _NODE_PATTERN.search(text, at):
        try:
            node, at = decoder.raw_decode(text, begin.start())
            found.append(node)
        except (json.JSONDecodeError, RecursionError):
            losses += 1
            at = begin.end()
    example = f"{complaint}: {len(found):,} whole nodes were read"
    return header, found, [Stat("read.truncated", "data_loss", max(losses, 1), example)]


def _to_ns(microseconds: Any) -> int | None:
    """Exact nanoseconds; None for what is no time."""
    if isinstance(microseconds, _ExactNumber):
        try:
            return int((Decimal(microseconds.text) * 1000).to_integral_value())
        except (InvalidOperation, OverflowError):
            return None
    if isinstance(microseconds, int) and not isinstance(microseconds, bool):
        return microseconds * 1000
    return None


def _is_device_node(node: dict[str, Any]) -> bool:
    return isinstance(node.get("cat"), str) and node["cat"] in DEVICE_CATEGORIES


def _add_node(nodes: NodeTableBuilder, node: dict[str, Any], pid: Any) -> None:
    listed = node.get("attrs")
    attrs = {
        attr["name"]: attr.get("value")
        for attr in (listed if isinstance(listed, list) else [])
        if isinstance(attr, dict) and isinstance(attr.get("name"), str)
    }
    on_device = _is_device_node(node)
    known = {} if on_device else {key: attrs.pop(key) for key in NODE_ATTRIBUTES if key in attrs}
    rest = {
        key: value
        for key, value in node.items()
        if key not in _KNOWN_MEMBERS | _DEPENDENCY_MEMBERS | set(_TIME_MEMBERS)
    }
    if on_device:
        rest |= {"is_cpu_op": False, "cat": node["cat"], "stream": node.get("stream")}
    else:
        rest |= attrs
    if (exclusive := _to_ns(node.get("exclusive_dur"))) is not None:
        rest["exclusive_dur_ns"] = exclusive
    parent = node.get("ctrl_deps")
    parent = parent if isinstance(parent, int) else None
    name = str(node.get("name", ""))
    place = nodes.add(node["id"], name, parent, known, rest)
    if not on_device:
        for io, side in enumerate(("inputs", "outputs")):
            given = node.get(side)
            if isinstance(given, dict):
                parts = [given.get(key) or [] for key in ("values", "shapes", "types", "strides")]
                if all(isinstance(part, list) for part in parts):
                    nodes.add_arguments(place, io, *parts)
    _add_dependencies(nodes, place, node, parent)
    if on_device and ("pg_name" in node or parse_collective(name)):
        nodes.add_comm(place, {"collective": parse_collective(name), "pg_name": node.get("pg_name")})
    elif "collective_name" in attrs:
        nodes.add_comm(place, _describe_communication(attrs))
    if (ts := _to_ns(node.get("ts"))) is not None:
        lane = _describe_track(node, known) if on_device else _describe_track(node, known) | {"pid": pid}
        nodes.add_event(place, {"ts": ts, "dur": _to_ns(node.get("inclusive_dur")), "name": name, **lane})


def _add_dependencies(nodes: NodeTableBuilder, place: int, node: dict[str, Any], parent: int | None) -> None:
    if parent is not None and parent != node["id"]:
        nodes.add_dependencies(place, [parent], "ctrl")
    if isinstance(on := node.get("inter_thread_dep"), int):
        nodes.add_dependencies(place, [on], "thread")
    given = node.get("sync_dep")
    listed = given if isinstance(given, list) else [given]
    nodes.add_dependencies(place, [on for on in listed if isinstance(on, int)], "sync")


def _describe_communication(attrs: dict[str, Any]) -> dict[str, Any]:
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


def _describe_track(node: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    if _is_device_node(node):
        return {"ph": "X", "cat": node["cat"], "tid": node.get("stream"), "stream": node.get("stream")}
    return {
        "ph": "X",
        "cat": "user_annotation" if known.get("scope") == _USER_SCOPE else "cpu_op",
        "tid": known.get("tid"),
        "rf_id": known.get("rf_id"),
        "seq_id": known.get("seq_id") if known.get("seq_id") != -1 else None,
    }


def _build_launches(tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Which operator each device event hangs on; ET+ does not keep the launch calls."""
    if "events" not in tables:
        return TABLES["launches"].empty()
    work = tables["events"].filter(pl.col("cat").is_in(sorted(DEVICE_CATEGORIES)))
    links = tables["links"].select("node", "event")
    operators = links.rename({"node": "parent", "event": "operator"})
    parents = tables["nodes"].select(node="id", parent="parent")
    hung = links.join(work.select(event="id"), on="event", how="semi").join(parents, on="node", how="left")
    return (
        hung.join(operators, on="parent", how="left")
        .select(device_event="event", operator="operator")
        .sort("device_event")
    )
