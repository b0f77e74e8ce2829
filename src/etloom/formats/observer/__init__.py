"""Files of etloom's observer: operators with times, tensors and process groups, readable even from a killed job.

Version 1, plain or gzip (docs/observer-format.md). A file whose process was killed is read up to its last record;
damaged chunks are skipped and counted. Every operator is a node and an event: the node has the root nodes and ids of
PyTorch's execution trace, the event has its times, on the OS thread where it began.

A tensor id identifies a tensor, not its address: an output at an address that nothing inside its operator has used
before is a new tensor.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.execution_trace import communication
from etloom.formats.observer import tables
from etloom.formats.observer.arguments import build_comms_table, decode_arguments
from etloom.formats.observer.notes import (
    add_kernel_columns,
    add_value_ranges,
    read_file_notes,
    read_operator_notes,
    rename_unfinished_step,
    summarize_ring_buffer,
)
from etloom.formats.observer.records import (
    MAGIC,
    NAME,
    Records,
    load_records,
)
from etloom.formats.tables import comms_table
from etloom.formats.tables.building import build_trace

_COUNTERS = (
    ("no_space", "data_loss", "operators not recorded because of the size limit or a full disk"),
    ("no_dictionary", "data_loss", "names or argument lists that exceed the size of the dictionary"),
    ("arguments_omitted", "data_loss", "argument lists too long for a record"),
    ("lists_truncated", "data_loss", "lists truncated to 4,096 items"),
    ("failed", "data_loss", "argument lists that torch could not provide"),
    ("reentrant", "data_loss", "operators caused by the observer itself"),
    ("raised", "info", "operators that ended with an exception"),
    ("ended_elsewhere", "info", "scopes that ended on another thread"),
    (
        "ended_outside",
        "info",
        "operators that ended in a recording window but began before it; the end is not recorded",
    ),
    ("unsized", "info", "tensors without plain sizes: nested or symbolic"),
    ("thread_exiting", "data_loss", "operators on a thread that was already exiting; not recorded"),
    ("overwritten", "info", "chunks of the ring buffer that were overwritten"),
    ("stuck", "error", "threads that hung inside the observer"),
)


def sniff(head: bytes) -> bool:
    """Return whether a file is from etloom's observer, judging from its first bytes ``head``."""
    return head.startswith(MAGIC)


def read(source: str | PathLike[str]) -> Trace:
    """Read a file of etloom's observer as the Trace of one rank.

    Raises:
        ReadError: The file cannot be read, is not an observer file or has another version.
    """
    path = Path(source)
    records = load_records(path)
    stats = records.stats
    operators = _build_operators(records)
    operators = rename_unfinished_step(operators, read_file_notes(records))
    operators, ring = summarize_ring_buffer(operators, records)
    arguments = decode_arguments(records)
    notes = read_operator_notes(records, operators)
    nodes = tables.add_arguments(tables.build_nodes(operators), arguments)
    nodes = add_value_ranges(add_kernel_columns(nodes, notes), notes)
    stats.append(
        Stat("read.missing_parent", "info", records.missing_parents, "the parent began before the recording")
    )
    tensors = tables.build_tensors(arguments.tensors, operators)
    comms = build_comms_table(nodes, tensors, notes, arguments, stats)
    stats += _summarize_recording(records, operators, ring)
    trace_tables = {
        "events": tables.build_events(operators, records),
        "nodes": nodes,
        "tensors": tensors,
        "comms": comms,
        "groups": comms_table.build_groups(communication.read_group_config(nodes)),
    }
    return build_trace(trace_tables, _build_meta(path, records, arguments.rank, ring), stats)


def _summarize_recording(
    records: Records, operators: pl.DataFrame, ring: dict[str, Any] | None
) -> list[Stat]:
    """Return stats about the recording: the observer's counters, unfinished, overwritten and recorded operators."""
    header = records.header
    stats = [
        Stat(f"read.observer_{name}", severity, min(int(header["counters"][i]), tables.NEVER), meaning)
        for i, (name, severity, meaning) in enumerate(_COUNTERS)
    ]
    still_open = int(operators["end"].is_null().sum())
    stats.append(Stat("read.open_operators", "info", still_open, "still running at the end of the recording"))
    if not header["closed"]:
        stats.append(Stat("read.unfinished_file", "info", 1, "its process was killed, or is still writing"))
    if ring is not None:
        seconds, steps = ring["overwritten_ns"] / 1e9, ring["whole_steps"]
        step_range = f" ({steps[0]} to {steps[-1]})" if steps else ""
        example = (
            f"in the first {seconds:.3g} s of the window; the ring buffer holds {len(steps)} complete "
            f"steps{step_range}"
        )
        stats.append(Stat("read.overwritten_operators", "info", ring["overwritten_operators"], example))
    stats.append(Stat("read.nodes", "info", operators.height, "operators in the file"))
    return stats


def _build_operators(records: Records) -> pl.DataFrame:
    """Build one row per operator, sorted by record function id: times in ns since the epoch, and the node's row."""
    columns, stats = records.operators, records.stats
    operators = pl.DataFrame({**columns, **_decode_names(records)})
    has_end = operators["has_end"] == 1
    operators = operators.with_columns(
        pl.col("fw_tid", "scope").cast(pl.Int64),
        pl.when(has_end).then("end").alias("end"),
        pl.when(has_end).then(pl.col("raised") == 1).alias("raised"),
    )
    negative = int((operators["end"] < operators["start"]).sum())
    for name, severity, count, example in (
        ("duplicate_node_id", "error", records.duplicates, "operators with the handle of another one"),
        ("end_without_begin", "info", records.ends_without_begin, "their begin is not in the file"),
        ("negative_duration", "error", negative, "operators that end before they begin; set to 0 ns"),
    ):
        stats.append(Stat(f"read.{name}", severity, count, example))
    shift = int(records.header["wall_ns"]) - int(records.header["mono_ns"])
    threads = operators["rf_tid"].n_unique()
    fixed_end = pl.when(pl.col("end") < pl.col("start")).then("start").otherwise("end")
    return operators.with_columns(
        pl.col("start") + shift,
        (fixed_end + shift).alias("end"),
        row=pl.int_range(pl.len(), dtype=pl.Int64) + 1 + threads,
    )


def _decode_names(records: Records) -> dict[str, pl.Series]:
    """Return the columns ``name`` and ``op_schema`` of all operators, decoded from the file's name definitions."""
    texts = {
        (stream << 32) | number: text
        for (kind, stream), names in records.definitions.items()
        if kind == NAME
        for number, text in names.items()
    }
    keys = np.array(sorted(texts), np.uint64)
    parts = [texts[key].decode("utf-8", "replace").split("\0") for key in keys.tolist()]
    name_keys = records.operators["name"]
    index = np.searchsorted(keys, name_keys)
    index[index == len(keys)] = 0
    has_name = keys[index] == name_keys if len(keys) else np.zeros(len(name_keys), bool)
    if not has_name.all():
        unnamed = int((~has_name).sum())
        records.stats.append(
            Stat(
                "read.unnamed_operator", "data_loss", unnamed, "operators whose name the file does not define"
            )
        )
    indices = pl.Series(np.where(has_name, index, len(keys)))
    name = pl.Series([part[0] for part in parts] + ["unknown"])
    schema = pl.Series([part[-1] if len(part) > 2 else None for part in parts] + [None], dtype=pl.String)
    return {
        "name": name.cast(pl.Categorical).gather(indices),
        "op_schema": schema.cast(pl.Categorical).gather(indices),
    }


def _build_meta(
    path: Path, records: Records, rank: int | None, ring: dict[str, Any] | None
) -> dict[str, Any]:
    header = records.header
    windows = records.windows
    texts = {name: header[name].decode("utf-8", "replace") for name in ("host", "torch")}
    wall_time = pl.Series([int(header["wall_ns"])]).cast(pl.Datetime("ns"))
    execution_trace = {
        "schema": "1.1.1-chakra.0.0.4",
        "pid": int(header["pid"]),
        "time": wall_time.dt.to_string("%Y-%m-%d %H:%M:%S")[0],
        "start_ts": int(header["mono_ns"]) // 1_000_000,
    }
    if windows:
        shift = int(header["wall_ns"]) - int(header["mono_ns"])
        execution_trace["finish_ts"] = (max(wall_ns for _, wall_ns in windows) - shift) // 1_000_000
    meta = {
        "files": [str(path)],
        "formats": ["observer"],
        "clock": "epoch",
        "host": texts["host"] or None,
        "rank": rank,
        "schema_version": execution_trace["schema"],
        "header": {
            "execution_trace": execution_trace,
            "observer": {
                **texts,
                "detail": bool(header["detail"]),
                "ring": bool(header["ring"]),
                **({} if ring is None else {"overwritten": ring}),
                "windows": sum(opens for opens, _ in windows),
            },
        },
    }
    return {key: value for key, value in meta.items() if value is not None}
