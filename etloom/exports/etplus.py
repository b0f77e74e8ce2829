"""ET+ JSON: the execution trace with the times of its operators and the device work that they launched.

The file of chakra_trace_link, which chakra_converter takes. Host nodes are those of the execution trace, under their
own ids, with ``ts``, ``inclusive_dur`` and ``exclusive_dur`` (decimal microseconds on the profiler's clock) where
they are linked, ``inter_thread_dep`` (the operator of another thread that it followed) and ``sync_dep`` (device
nodes waited for). Device nodes follow with ids of their own and hang on their operator by ``ctrl_deps``.

Unlike the peer's, a device node holds its own facts (device, stream, correlation, bytes, launch geometry) and no
copy of its operator's, but for the tensors of a collective, from which converters take its size.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom import kinds, stacks
from etloom.errors import EtloomError
from etloom.exports import _et_nodes
from etloom.exports._files import replacing
from etloom.trace import Job, Trace

SUFFIX = (".etplus.json", ".etplus.json.gz")

_HEADER = {"schema": "1.1.1-chakra.0.0.4", "pid": 0, "time": "", "start_ts": 0}


def write(trace: Trace | Job, path: str | PathLike[str]) -> None:
    """Write the linked Trace of one rank, packed where the name ends in .gz.

    Raises EtloomError for several ranks in one file and for a trace without an execution trace.
    """
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(
                f"one file holds one rank, not {len(trace)}",
                where=path,
                remedy="add --rank, or link to a folder",
            )
        trace = next(iter(trace.values()))
    if not trace.nodes.height:
        raise EtloomError(
            "there is no execution trace to add times to", where=path, remedy="link it with one"
        )
    header = {**_HEADER, **(trace.meta.get("header", {}).get("execution_trace") or {})}
    # 1.0.1 is flat: its nodes are written in the layout that came next.
    header["schema"] = "1.0.2-chakra.0.0.4" if header["schema"] == "1.0.1" else header["schema"]
    finish = {key: header.pop(key) for key in ("finish_ts",) if key in header}
    with replacing(Path(path)) as file:
        file.write((json.dumps(header)[:-1] + ', "nodes": [\n').encode())
        separator = ""
        for node in _nodes(trace):
            file.write((separator + node).encode())
            separator = ",\n"
        file.write(
            (
                "\n]" + "".join(f", {json.dumps(key)}: {value}" for key, value in finish.items()) + "}\n"
            ).encode()
        )


def _nodes(trace: Trace) -> Iterator[str]:
    """The nodes as JSON text: those of the host, then those of the device."""
    device = _device_nodes(trace)
    times = _times(trace)
    waited = _waited(trace, device)
    after = _followed(trace)
    for row, text in _et_nodes.nodes(trace):
        if row in times:
            text += times[row] + f', "inter_thread_dep": {json.dumps(after.get(row))}'
            if row in waited:
                text += f', "sync_dep": {json.dumps(waited[row])}'
        yield text + "}"
    yield from (text for _, text in device.values())


def _us(ns: int) -> str:
    """Decimal microseconds, exact: a double would not hold those of the epoch."""
    return f"{ns // 1000}.{ns % 1000:03}"


def _times(trace: Trace) -> dict[int, str]:
    """The members that say when each linked node ran, by row of the node."""
    base = int(trace.meta.get("base_ns") or 0)
    events = trace.events.select("id", "ts", pl.col("dur").fill_null(0)).with_columns(
        stacks.exclusive_time(trace.events, operators_only=True).alias("exclusive")
    )
    # An operator may be linked to several iterations; its times are those of the first.
    linked = trace.links.join(events, left_on="event", right_on="id").sort("ts").unique("node", keep="first")
    return {
        node: f', "ts": {_us(ts - base)}, "inclusive_dur": {_us(dur)}, "exclusive_dur": {_us(exclusive or 0)}'
        for node, ts, dur, exclusive in linked.select("node", "ts", "dur", "exclusive").iter_rows()
    }


def _node_of_event(trace: Trace) -> dict[int, int]:
    """The row of the node of an event, or of the nearest linked event around it."""
    events = trace.events
    node = dict(trace.links.select("event", "node").iter_rows())
    # Parents come before their children, since events are sorted by start.
    for event, parent in events.select("id", "parent").filter(pl.col("parent").is_not_null()).iter_rows():
        if event not in node and parent in node:
            node[event] = node[parent]
    return node


def _device_nodes(trace: Trace) -> dict[int, tuple[int, str]]:
    """(node id, JSON text) of each device event, in order of time."""
    base = int(trace.meta.get("base_ns") or 0)
    et_ids = dict(trace.nodes.select("id", "et_id").iter_rows())
    node_of = _node_of_event(trace)
    launched = {
        event: (launch, operator)
        for launch, event, operator in trace.launches.select("launch", "device_event", "operator").iter_rows()
    }
    kernels = {row.pop("event"): row for row in _plain(trace.kernels).iter_rows(named=True)}
    comms = {
        row["event"]: row
        for row in _plain(trace.comms.filter(pl.col("event").is_not_null())).iter_rows(named=True)
    }
    root = min(et_ids.values())
    work = _plain(trace.events.filter(stacks.among(trace.events["cat"], kinds.DEVICE)))
    made: dict[int, tuple[int, str]] = {}
    for number, row in enumerate(work.iter_rows(named=True), max(et_ids.values()) + 1):
        launch, operator = launched.get(row["id"], (None, None))
        parent = node_of.get(operator if operator is not None else launch)  # type: ignore[arg-type]
        comm = comms.get(row["id"])
        inputs, outputs = _et_nodes.empty_side(), _et_nodes.empty_side()
        if comm is not None and parent is not None:
            inputs, outputs = _et_nodes.side_of(trace, parent)
        node = {
            "id": number,
            "name": row["name"],
            "ctrl_deps": root if parent is None else et_ids[parent],
            "inputs": inputs,
            "outputs": outputs,
            "attrs": _device_attributes(row, kernels.get(row["id"], {})),
            "cat": row["cat"],
            "ph": row["ph"],
            "stream": row["stream"],
        }
        if comm is not None and comm["pg_name"] is not None:
            node["pg_name"] = comm["pg_name"]
        length = row["dur"] or 0
        made[row["id"]] = (
            number,
            json.dumps(node)[:-1]
            + f', "ts": {_us(row["ts"] - base)}, "inclusive_dur": {_us(length)}, "exclusive_dur": {_us(length)}}}',
        )
    return made


def _device_attributes(event: dict[str, Any], kernel: dict[str, Any]) -> list[dict[str, Any]]:
    """What converters look for in every node, empty, and what the device event says of itself."""
    listed = [
        _et_nodes.attribute(name, kind, none)
        for name, kind, none in (
            ("rf_id", "uint64", 0),
            ("fw_parent", "uint64", 0),
            ("seq_id", "int64", -1),
            ("scope", "uint64", 0),
            ("tid", "uint64", 0),
            ("fw_tid", "uint64", 0),
            ("op_schema", "string", ""),
        )
    ]
    own = {"device": event["device"], "correlation": event["correlation"], **kernel}
    for name, value in own.items():
        if value is not None:
            kind = "string" if isinstance(value, str) else "double" if isinstance(value, float) else "int64"
            listed.append(_et_nodes.attribute(name, kind, value))
    return listed


def _followed(trace: Trace) -> dict[int, int]:
    """Row of a node -> id of the node on another thread that it followed."""
    node_of = dict(trace.links.select("event", "node").iter_rows())
    et_ids = dict(trace.nodes.select("id", "et_id").iter_rows())
    found = {}
    for event, after in (
        trace.handoffs.filter(pl.col("kind") == "thread").select("event", "after").iter_rows()
    ):
        if event in node_of and after in node_of:
            found[node_of[event]] = et_ids[node_of[after]]
    return found


def _waited(trace: Trace, device: dict[int, tuple[int, str]]) -> dict[int, list[int]]:
    """Row of a node -> ids of the device nodes that a call in it waited for."""
    node_of = _node_of_event(trace)
    found: dict[int, list[int]] = defaultdict(list)
    for event, on in trace.waits.select("event", "on").iter_rows():
        if event in node_of and event not in device and on in device:
            found[node_of[event]].append(device[on][0])
    return found


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))
