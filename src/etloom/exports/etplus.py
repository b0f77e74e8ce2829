"""Write ET+ JSON: an execution trace with the times of its operators and the GPU work that they launched.

This is the format of chakra_trace_link, which chakra_converter reads. Host nodes are those of the execution trace, with
their original ids and, where they are linked, ``ts``, ``inclusive_dur`` and ``exclusive_dur`` (decimal microseconds on
the profiler's clock), ``inter_thread_dep`` (the operator of another thread that it depends on) and ``sync_dep`` (the
device nodes it waited for). Device nodes follow with new ids; their ``ctrl_deps`` is their operator.

Unlike chakra_trace_link's, a device node has its own attributes (device, stream, correlation, bytes, launch geometry)
instead of a copy of its operator's, except for the tensors of a collective, from which converters compute its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import numpy as np
import polars as pl

from etloom.core import nesting
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.formats.etplus import device_nodes
from etloom.formats.execution_trace.node_json import NodeTexts, allocate_ids, select_host_nodes
from etloom.formats.execution_trace.writer import write_document
from etloom.formats.io.json_text import format_microseconds, quote_texts
from etloom.linker.quality import find_enclosing_nodes, find_launching_nodes, is_in_scope

SUFFIX = (".etplus.json", ".etplus.json.gz")

_HEADER = {"schema": "1.1.1-chakra.0.0.4", "pid": 0, "time": "", "start_ts": 0}
_CHUNK_NODES = 1 << 12  # about 5 MB of text


def write(trace: Trace | Job, path: str | PathLike[str]) -> None:
    """Write the linked Trace of one rank as ET+ JSON; compressed if the name ends in .gz.

    Raises:
        EtloomError: There are several ranks, there is no execution trace, it is linked with several iterations, or its
            ids leave no room for device nodes.
    """
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(
                f"a file contains one rank, not {len(trace)}",
                where=path,
                remedy="select one with --rank, or link to a folder",
            )
        trace = next(iter(trace.values()))
    if not trace.nodes.height:
        raise EtloomError("the trace has no execution trace", where=path, remedy="link it with one")
    if not trace.links["node"].is_unique().all():
        raise EtloomError(
            "the operators are linked with several iterations, but an ET+ contains one",
            where=path,
            remedy="select one with --iterations N, or save as Parquet",
        )
    trace = select_host_nodes(trace)
    header = {**_HEADER, **(trace.meta.get("header", {}).get("execution_trace") or {})}
    # Nodes of schema 1.0.1, which is flat, are written in the layout of the next version.
    header["schema"] = "1.0.2-chakra.0.0.4" if header["schema"] == "1.0.1" else header["schema"]
    write_document(Path(path), header, _format_nodes(trace))


def _format_nodes(trace: Trace) -> Iterator[np.ndarray | pl.Series]:
    """Yield the ET+ nodes as JSON texts, in chunks: host nodes, then device nodes."""
    nodes = NodeTexts(trace)
    device = _number_device_nodes(trace)
    members = _format_times(trace).join(
        _format_sync_dependencies(trace, device), on="node", how="full", coalesce=True
    )
    above = trace.nodes.select(pl.col("id").alias("parent"), pl.col("et_id").alias("above"))
    host = (
        trace.nodes.join(above, on="parent", how="left", maintain_order="left")
        .with_columns(pl.col("above").fill_null(pl.col("recorded_parent")))
        .join(members, left_on="id", right_on="node", how="left", maintain_order="left")
    )
    yield from nodes.format_nodes(host, "times", "waited")
    for start in range(0, device.height, _CHUNK_NODES):
        yield device_nodes.format_device_nodes(trace, nodes, device.slice(start, _CHUNK_NODES))


def _number_device_nodes(trace: Trace) -> pl.DataFrame:
    """Return the GPU events by time, with new ET+ node ids and the columns that `format_device_nodes` requires.

    The column above is the node of the operator around the launch. If that operator is not linked, it is the node of
    the nearest linked event around the operator; null if there is none. Events of iterations that the execution trace
    does not cover are left out (`etloom.linker.quality`).
    """
    node = find_launching_nodes(trace)
    work = trace.launches.select(pl.col("device_event").alias("id"), node, in_scope=is_in_scope(trace, node))
    work = work.unique("id", keep="last").join(trace.events, on="id").filter("in_scope").sort("ts", "id")
    above = trace.nodes.select(pl.col("id").alias("node"), pl.col("et_id").alias("above"))
    comms = trace.comms.drop_nulls("event").unique("event", keep="last")
    comms = comms.select(
        pl.col("event").alias("id"), quote_texts(comms["pg_name"]).alias("pg_name"), is_comm=True
    )
    kernels = trace.kernels.unique("event", keep="last").rename({"event": "id"})
    for frame, key in ((above, "node"), (comms, "id"), (kernels, "id")):
        work = work.join(frame, on=key, how="left", maintain_order="left")
    return work.with_columns(number=allocate_ids(trace, work.height))


def _format_times(trace: Trace) -> pl.DataFrame:
    """Format the times and inter-thread dependency of each linked node as JSON; return columns ``node``, ``times``."""
    base = int(trace.meta.get("base_ns") or 0)
    events = trace.events.select("id", pl.col("ts") - base, pl.col("dur").fill_null(0)).with_columns(
        nesting.compute_exclusive_time(trace.events, operators_only=True).fill_null(0).alias("exclusive")
    )
    linked = trace.links.join(events, left_on="event", right_on="id")
    linked = linked.join(_find_thread_dependencies(trace), on="node", how="left")
    return linked.select(
        "node",
        times=pl.concat_str(
            *(pl.lit(', "ts": '), format_microseconds("ts")),
            *(pl.lit(', "inclusive_dur": '), format_microseconds("dur")),
            *(pl.lit(', "exclusive_dur": '), format_microseconds("exclusive")),
            *(pl.lit(', "inter_thread_dep": '), pl.col("followed").cast(pl.String).fill_null("null")),
        ),
    )


def _find_thread_dependencies(trace: Trace) -> pl.DataFrame:
    """Return nodes that continue the work of another thread: columns ``node``, ``followed`` (id of the node before)."""
    nodes = trace.links.select("event", "node")
    return (
        trace.thread_dependencies.filter(pl.col("kind") == "thread")
        .join(nodes, on="event")
        .join(nodes.select(after="event", other="node"), on="after")
        .join(trace.nodes.select(other="id", followed="et_id"), on="other")
        .select("node", "followed")
        .unique("node", keep="last", maintain_order=True)
    )


def _format_sync_dependencies(trace: Trace, device: pl.DataFrame) -> pl.DataFrame:
    """Format as JSON the device nodes that calls within each node waited for; return columns ``node``, ``waited``."""
    waits = trace.sync_dependencies.select("event", "on").join(
        device.select(event="id"), on="event", how="anti"
    )
    waits = waits.join(device.select(on="id", number="number"), on="on", maintain_order="left")
    waits = waits.with_columns(node=find_enclosing_nodes(trace, waits["event"])).drop_nulls("node")
    waits = waits.unique(["node", "number"], keep="first", maintain_order=True)
    return waits.group_by("node", maintain_order=True).agg(
        waited=pl.concat_str(
            pl.lit(', "sync_dep": ['), pl.col("number").cast(pl.String).str.join(", "), pl.lit("]")
        ).first()
    )
