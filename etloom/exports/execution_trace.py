"""PyTorch execution trace JSON 1.1.1: what ExecutionTraceObserver writes and its readers take.

From any trace that holds nodes. Nodes stand in the order in which operators ended, under their ids; parents are the
repaired ones. The format has no times.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.formats.execution_trace.node_json import NodeTexts, select_host_nodes
from etloom.formats.io.atomic_file import open_atomic

SUFFIX = (".et.json", ".et.json.gz")

_SCHEMA = "1.1.1-chakra.0.0.4"
_HEADER = {"schema": _SCHEMA, "pid": 0, "time": "", "start_ts": 0}
_CHUNK = 1 << 14  # nodes; about 20 MB of text


def write(trace: Trace | Job, path: str | PathLike[str]) -> None:
    """Write the nodes of one rank, packed where the name ends in .gz.

    Raises EtloomError for several ranks in one file and for a trace without nodes.
    """
    if isinstance(trace, Job):
        if len(trace) != 1:
            raise EtloomError(
                f"one file holds one rank, not {len(trace)}", where=path, remedy="convert them one by one"
            )
        trace = next(iter(trace.values()))
    if not trace.nodes.height:
        raise EtloomError("the trace holds no operators of an execution trace", where=path)
    trace = select_host_nodes(trace)
    header = {**_HEADER, **(trace.meta.get("header", {}).get("execution_trace") or {}), "schema": _SCHEMA}
    finish = header.pop("finish_ts", None)
    above = trace.nodes.select(pl.col("id").alias("parent"), pl.col("et_id").alias("above"))
    nodes = trace.nodes.join(above, on="parent", how="left").with_columns(
        pl.col("above").fill_null(pl.col("recorded_parent")).fill_null(1)
    )
    nodes = nodes.sort("file_order", "et_id")
    texts = NodeTexts(trace)
    with open_atomic(Path(path)) as file:
        file.write((json.dumps(header)[:-1] + ', "nodes": [\n').encode())
        for start in range(0, nodes.height, _CHUNK):
            text = texts.texts(nodes.slice(start, _CHUNK)).str.join(",\n").item()
            file.write(((",\n" if start else "") + text).encode())
        file.write(
            ("\n]" + (f', "finish_ts": {json.dumps(finish)}' if finish is not None else "") + "}\n").encode()
        )
