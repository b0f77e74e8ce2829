"""PyTorch execution traces (Chakra host traces): every operator with its tensors, shapes, parents and groups; no times.

Schemas 1.0.1 (flat keys), 1.0.2, 1.0.3, 1.0.4, 1.1.0 and 1.1.1 (``-chakra.0.0.4``), as torch 1.13 to 2.13 write them;
plain, gzip or zstd. A file of another schema version is read in the same way and counted.

Parents are repaired: when an asynchronous operator ends, PyTorch closes whatever operator is innermost, so a recorded
parent can be wrong. Node ids have the order of entry and the file has the order of exit, so on one thread A encloses B
exactly if A has the lower id and follows B in the file.

Format: torch/csrc/profiler/standalone/execution_trace_observer.cpp.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl

from etloom import _native
from etloom.core import arrays, categories
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.execution_trace import communication
from etloom.formats.io.native_parser import ParsedFile, Progress, parse_file
from etloom.formats.tables import comms_table

SCHEMAS = ("1.0.1", *(f"{number}-chakra.0.0.4" for number in ("1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")))
_ROOT = r"^\[pytorch\|profiler\|execution_(?:trace|graph)\|(?:thread|process)\]$"


def sniff(head: bytes) -> bool:
    """Return whether a file is an execution trace, judging from its first bytes ``head``."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] != b"{" or b'"traceEvents"' in text:
        return False
    if re.search(rb'"nodes"\s*:\s*\[', text) is None:
        return False
    # ET+ nodes have times; they belong to the etplus reader
    return re.search(rb'"(?:rf_id|ctrl_deps|op_schema|schema)"', text) is not None and not re.search(
        rb'"(?:exclusive_dur|inclusive_dur)"', text
    )


def read(
    source: str | PathLike[str],
    *,
    progress: Annotated[
        Progress | None, "Called with the number of bytes of the file as they are read."
    ] = None,
) -> Trace:
    """Read a PyTorch execution trace file as a Trace, which has no times.

    Raises:
        ReadError: If the file cannot be read or is not a trace.
        LimitError: For a decompression bomb.
    """
    path = Path(source)
    return to_trace(parse_file(_native.execution_trace_parser(), path, progress), path)


def to_trace(parsed: ParsedFile, path: Path) -> Trace:
    """Build the Trace from parsed tables: repair the parents of nodes, extract communication and process groups."""
    stats: list[Stat] = list(parsed.stats)
    header = parsed.header
    schema = header.get("schema")
    if schema not in SCHEMAS:
        stats.append(
            Stat("read.unknown_schema", "info", 1, f"{schema!r} is read as the nearest known schema")
        )
    nodes = parsed.tables["nodes"].with_row_index("id")
    repeated = int((np.diff(nodes["et_id"].to_numpy()) == 0).sum())
    if repeated:
        stats.append(Stat("read.duplicate_node_id", "error", repeated, "node ids that occur more than once"))
    nodes = _repair_parents(nodes, stats)
    comms = communication.build_comms(nodes, parsed.tables["tensors"], parsed.tables["comms"], stats)
    stats.append(Stat("read.nodes", "info", parsed.rows, "nodes in the file"))
    meta: dict[str, Any] = {
        "files": [str(path)],
        "formats": ["execution_trace"],
        "schema_version": schema,
        "header": {"execution_trace": header},
    }
    tables = {
        "nodes": nodes,
        "tensors": parsed.tables["tensors"],
        "comms": comms,
        "groups": comms_table.build_groups(communication.read_group_config(nodes)),
    }
    return Trace(tables, meta).with_stats(stats)


def _repair_parents(nodes: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Add each node's ``parent``: the row of the operator that encloses the node, or else of the recorded parent."""
    name = nodes["name"]
    root = arrays.match_text(nodes["name"], _ROOT)
    # An asynchronous range ends on another thread: it encloses nothing, and its end does not show what encloses it.
    asynchronous = arrays.match_text(nodes["name"], categories.BACKEND_RANGE)
    nesting = np.flatnonzero(~asynchronous)
    order = nodes["file_order"].cast(pl.Int64).to_numpy().copy()
    order[root] = np.iinfo(np.int64).max // 2  # roots are written first or last, and enclose all
    threads = arrays.to_array(nodes["tid"], -1)[nesting]
    parents, _, _ = _native.nest(threads, np.zeros(len(nesting), np.int64), order[nesting])
    by_nesting = np.full(nodes.height, -1, np.int64)
    by_nesting[nesting] = np.where(parents >= 0, nesting[parents], -1)

    et_ids = nodes["et_id"].to_numpy()  # sorted
    recorded_ids = arrays.to_array(nodes["recorded_parent"], -1)
    recorded = _find_rows(recorded_ids, et_ids)
    parent = np.where(by_nesting >= 0, by_nesting, recorded)
    parent[parent == np.arange(nodes.height)] = -1
    repaired = np.flatnonzero((by_nesting >= 0) & (by_nesting != recorded))
    if len(repaired):
        example = f"{name[int(repaired[0])]} (node {nodes['et_id'][int(repaired[0])]})"
        stats.append(Stat("read.repaired_parent", "info", len(repaired), example))
    orphans = np.flatnonzero((parent < 0) & ~root & arrays.is_present(nodes["recorded_parent"]))
    if len(orphans):
        example = f"{name[int(orphans[0])]}: its parent is not in the file"
        stats.append(Stat("read.missing_parent", "info", len(orphans), example))
    column = arrays.to_series(parent, "parent").cast(pl.Int64)
    return nodes.with_columns(column.set(column < 0, None).cast(pl.UInt32))


def _find_rows(queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the index of each query in the sorted array ``ids`` (the first of equal ids), or -1 if it is absent."""
    if not len(ids):
        return np.full(len(queries), -1, np.int64)
    if int(ids[-1]) - int(ids[0]) < 8 * len(ids):  # ids without large gaps: look up in an array
        rows = np.full(int(ids[-1]) - int(ids[0]) + 2, -1, np.int64)  # the last element: not among the ids
        rows[ids[::-1] - ids[0]] = np.arange(len(ids) - 1, -1, -1)
        inside = (queries >= ids[0]) & (queries <= ids[-1])
        return rows[np.where(inside, queries - ids[0], len(rows) - 1)]
    place = np.minimum(np.searchsorted(ids, queries), len(ids) - 1)
    return np.where(ids[place] == queries, place, -1)
