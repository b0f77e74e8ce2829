"""Files of etloom's own observer: operators with their times, tensors and process groups, even from a killed job.

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
import numpy.typing as npt
import polars as pl

from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.execution_trace import communication
from etloom.formats.observer import tables
from etloom.formats.observer.arguments import build_comms_table, decode_arguments
from etloom.formats.observer.notes import (
    add_kernel_columns,
    read_file_notes,
    read_operator_notes,
    rename_unfinished_step,
    summarize_ring_buffer,
)
from etloom.formats.observer.records import (
    BEGIN,
    END,
    MAGIC,
    NAME,
    WINDOW,
    Definitions,
    Records,
    load_records,
    read_definitions,
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
    ("ended_outside", "info", "operators that began before the window"),
    ("unsized", "info", "tensors without plain sizes: nested or symbolic"),
    ("thread_exiting", "data_loss", "operators on a thread that was ending"),
    ("overwritten", "info", "chunks of the ring buffer that were overwritten"),
    ("stuck", "error", "threads that hung inside the observer"),
)


def sniff(head: bytes) -> bool:
    """Return whether these are the first bytes of an observer file."""
    return head.startswith(MAGIC)


def read(source: str | PathLike[str]) -> Trace:
    """Read the Trace of one rank.

    Raises:
        ReadError: The file cannot be read, is not an observer file or has another version.
    """
    path = Path(source)
    records = load_records(path)
    stats = records.stats
    definitions = read_definitions(records)
    operators = _build_operators(records, definitions, stats)
    operators = rename_unfinished_step(operators, read_file_notes(records, definitions))
    operators, ring = summarize_ring_buffer(operators, records)
    arguments = decode_arguments(records, definitions, operators, stats)
    notes = read_operator_notes(records, definitions, operators)
    nodes = tables.add_arguments(tables.build_nodes(operators, stats), arguments)
    nodes = add_kernel_columns(nodes, notes)
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
    """Return the rows of stats about the recording itself."""
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


def _build_operators(records: Records, definitions: Definitions, stats: list[Stat]) -> pl.DataFrame:
    """Build one row per operator from its begin and end records, sorted by handle. ``row`` is the operator's
    row in the nodes table."""
    words, begin, end = records.words, records.select_rows(BEGIN), records.select_rows(END)
    first = records.at[begin]
    packed = words[first + 5]
    names = _decode_names(records, definitions, begin, (packed & 0xFFFFFFFF).astype(np.int64))
    begins = pl.DataFrame(
        {
            "handle": words[first + 2],
            "start": words[first + 1].astype(np.int64),
            "enclosing": words[first + 3],
            "seq_id": words[first + 4].astype(np.int64),
            "fw_tid": ((packed >> 32) & 0xFFFF).astype(np.int64),
            "scope": ((packed >> 48) & 0xFF).astype(np.int64),
            "asynchronous": (records.flags[begin] & 1) == 1,
            "rf_tid": records.rf_tid[begin],
            "os_tid": records.os_tid[begin],
            "begin": begin,
            **names,
        }
    )
    first = records.at[end]
    ends = pl.DataFrame(
        {
            "handle": words[first + 2],
            "end": words[first + 1].astype(np.int64),
            "raised": (records.flags[end] & 1) == 1,
            "ended": end,
        }
    )
    unique_begins, unique_ends = _sort_by_handle(begins), _sort_by_handle(ends)
    duplicates = begins.height - unique_begins.height
    stats.append(
        Stat("read.duplicate_node_id", "error", duplicates, "operators with the handle of another one")
    )
    handles, end_handles = unique_begins["handle"].to_numpy(), unique_ends["handle"].to_numpy()
    index = np.searchsorted(end_handles, handles)
    index[index == len(end_handles)] = 0
    matched = end_handles[index] == handles if len(end_handles) else np.zeros(len(handles), bool)
    matching = pl.select(pl.when(pl.Series(matched)).then(pl.Series(index))).to_series()
    operators = unique_begins.with_columns(
        unique_ends[name].gather(matching) for name in ("end", "raised", "ended")
    )
    unmatched = unique_ends.height - int(matched.sum())
    stats.append(Stat("read.end_without_begin", "info", unmatched, "their begin is not in the file"))
    negative = int((operators["end"] < operators["start"]).sum())
    stats.append(
        Stat("read.negative_duration", "error", negative, "operators that end before they begin; set to 0 ns")
    )
    shift = int(records.header["wall_ns"]) - int(records.header["mono_ns"])
    threads = operators["rf_tid"].n_unique()
    fixed_end = pl.when(pl.col("end") < pl.col("start")).then("start").otherwise("end")
    return operators.with_columns(
        pl.col("start") + shift,
        (fixed_end + shift).alias("end"),
        row=pl.int_range(pl.len(), dtype=pl.Int64) + 1 + threads,
    )


def _sort_by_handle(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows sorted by handle; if several rows have one handle, only the first of them."""
    handles = rows["handle"].to_numpy()
    order = np.argsort(handles, kind="stable")
    is_first = np.ones(len(order), bool)
    is_first[1:] = handles[order[1:]] != handles[order[:-1]]
    return rows[order[is_first]]


def _decode_names(
    records: Records, definitions: Definitions, begin: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> dict[str, pl.Series]:
    """Return the columns name and op_schema of the operators that begin at these records."""
    texts = {
        (stream << 32) | number: text
        for (kind, stream), names in definitions.items()
        if kind == NAME
        for number, text in names.items()
    }
    keys = np.array(sorted(texts), np.uint64)
    parts = [texts[key].decode("utf-8", "replace").split("\0") for key in keys.tolist()]
    name_keys = (records.stream[begin].astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)
    index = np.searchsorted(keys, name_keys)
    index[index == len(keys)] = 0
    has_name = keys[index] == name_keys if len(keys) else np.zeros(len(name_keys), bool)
    if not has_name.all():
        unnamed = int((~has_name).sum())
        records.stats.append(
            Stat("read.unnamed_operator", "data_loss", unnamed, "the definition of their name is missing")
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
    window_rows = records.select_rows(WINDOW)
    window_times = records.words[records.at[window_rows] + 1].astype(np.int64)
    texts = {name: header[name].decode("utf-8", "replace") for name in ("host", "torch")}
    wall_time = pl.Series([int(header["wall_ns"])]).cast(pl.Datetime("ns"))
    execution_trace = {
        "schema": "1.1.1-chakra.0.0.4",
        "pid": int(header["pid"]),
        "time": wall_time.dt.to_string("%Y-%m-%d %H:%M:%S")[0],
        "start_ts": int(header["mono_ns"]) // 1_000_000,
    }
    if len(window_times):
        shift = int(header["wall_ns"]) - int(header["mono_ns"])
        execution_trace["finish_ts"] = (int(window_times.max()) - shift) // 1_000_000
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
                "windows": int((records.flags[window_rows] == 1).sum()),
            },
        },
    }
    return {key: value for key, value in meta.items() if value is not None}
