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
from numpy.typing import NDArray

from etloom import _native
from etloom.core.arrays import to_array
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.execution_trace import communication
from etloom.formats.observer.arguments import OperatorArguments, build_comms_table, decode_arguments
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
from etloom.formats.tables.building import build_trace, sort_events

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
    nodes = add_arguments(build_nodes(operators), arguments)
    nodes = add_value_ranges(add_kernel_columns(nodes, notes), notes)
    stats.append(
        Stat("read.missing_parent", "info", records.missing_parents, "the parent began before the recording")
    )
    tensors = build_tensors(arguments.tensors, operators)
    comms = build_comms_table(nodes, tensors, notes, arguments, stats)
    stats += _summarize_recording(records, operators, ring)
    trace_tables = {
        "events": build_events(operators, records),
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
        Stat(f"read.observer_{name}", severity, min(int(header["counters"][i]), NEVER), meaning)
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


# Builds the tables nodes, events and tensors of an observer file from its operators.

Array = NDArray[Any]

NEVER = np.iinfo(np.int64).max
_ROOT_NAME = "[pytorch|profiler|execution_trace|%s]"
_USER_SCOPE = 7
_GROUP_INIT_NAME = "## process_group:init ##"


def build_nodes(operators: pl.DataFrame) -> pl.DataFrame:
    """Build the nodes table without arguments: root nodes of the process and of its threads, then the operators.

    Args:
        operators: One row per operator, sorted by handle.
    """
    threads = operators["rf_tid"].unique().sort()
    roots = np.searchsorted(threads.to_numpy(), operators["rf_tid"].to_numpy()) + 1
    parent = operators["parent"].to_numpy()
    parent = np.where(parent >= 0, parent + 1 + len(threads), roots)
    end = to_array(operators["end"], NEVER)
    # Of operators that end at the same time the inner one, which began later, comes first.
    order = np.empty(len(end), np.int64)
    order[len(end) - 1 - np.argsort(end[::-1], kind="stable")] = np.arange(len(end))
    operator_nodes = operators.select(
        pl.col("row").alias("id"),
        (pl.col("row") + 1).alias("et_id"),
        "name",
        pl.Series("parent", parent),
        pl.Series("recorded_parent", parent + 1),
        pl.Series("file_order", order),
        "scope",
        pl.col("rf_tid").alias("tid"),
        "fw_tid",
        pl.Series("fw_parent", np.where(operators["scope"].to_numpy() == 1, parent + 1, 0)),
        "seq_id",
        pl.col("handle").cast(pl.Int64, strict=False).alias("rf_id"),
        "op_schema",
        attrs=pl.when("raised").then(pl.lit('{"raised": true}')),
    )
    text = pl.col("name", "op_schema").cast(pl.Categorical)
    root_nodes = _build_roots(threads, len(end)).with_columns(op_schema=pl.lit(None, pl.String))
    return pl.concat(
        [root_nodes.with_columns(text), operator_nodes.with_columns(text)], how="diagonal_relaxed"
    ).with_columns(
        _replace_missing("seq_id", -1),
        _replace_missing("fw_tid", 0),
        _replace_missing("fw_parent", 0),
        _replace_missing("rf_id", 0),
    )


def _build_roots(threads: pl.Series, operator_count: int) -> pl.DataFrame:
    """Build root nodes like those of PyTorch's execution trace: one for the process, and one per thread."""
    count = len(threads) + 1
    return pl.DataFrame(
        {
            "id": range(count),
            "et_id": range(1, count + 1),
            "name": [_ROOT_NAME % "process", *[_ROOT_NAME % "thread"] * len(threads)],
            "parent": [None] + [0] * len(threads),
            "recorded_parent": [1] * count,
            "file_order": [operator_count + count - 1, *range(operator_count, operator_count + count - 1)],
            "scope": [_USER_SCOPE] * count,
            "tid": [0, *threads],
            "fw_tid": [0] * count,
            "fw_parent": [0] * count,
            "seq_id": [-1] * count,
            "rf_id": [0] * count,
        }
    )


def _replace_missing(column: str, missing: int) -> pl.Expr:
    """Return a polars expression for a column with null in place of ``missing``, the file's code for no value."""
    return pl.when(pl.col(column) != missing).then(column).alias(column)


def build_events(operators: pl.DataFrame, records: Records) -> pl.DataFrame:
    """Build the events table: one row per operator of the job, with times in ns, sorted by start time."""
    is_annotation = operators["scope"] == _USER_SCOPE
    category = pl.when(is_annotation).then(pl.lit("user_annotation")).otherwise(pl.lit("cpu_op"))
    events = operators.select(
        category.cast(pl.Categorical).alias("cat"),
        "name",
        pl.col("start").alias("ts"),
        (pl.col("end") - pl.col("start")).alias("dur"),
        pl.lit(int(records.header["pid"]), pl.Int64).alias("pid"),
        pl.col("os_tid").alias("tid"),
        pl.col("handle").cast(pl.Int64, strict=False).alias("rf_id"),
        _replace_missing("seq_id", -1),
        _replace_missing("fw_tid", 0).alias("fwd_tid"),
        position=pl.int_range(pl.len(), dtype=pl.Int64),
        ph=pl.lit("X").cast(pl.Categorical),
    )
    # The observer itself records the process groups in this operator; it is not part of the job.
    events = events.filter(pl.col("name").cast(pl.String) != _GROUP_INIT_NAME)
    return sort_events(events).with_row_index("id")


def add_arguments(nodes: pl.DataFrame, arguments: OperatorArguments) -> pl.DataFrame:
    """Add inputs, outputs and their types as JSON to the nodes table; ``[]`` for root nodes and empty lists."""
    columns = {}
    for name, column in arguments.columns.items():
        empty = pl.Series([None] * (nodes.height - len(column)), dtype=pl.Categorical)
        columns[name] = pl.concat([empty, column.cast(pl.Categorical)]).fill_null("[]")
    return nodes.with_columns(**columns)


def build_tensors(tensors: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Build the tensors table with ids that identify tensors: a tensor at a reused memory address gets a new id.

    Args:
        tensors: Columns of the table, with ``operator`` (row of the operator), ``address`` and ``storage`` in place of
            ids; sorted by operator and argument.
        operators: One row per operator, sorted by handle.
    """
    row = tensors["operator"].to_numpy()
    begin = operators["start"].to_numpy()[row]
    is_output = tensors["io"].to_numpy() == 1
    time = np.where(is_output, to_array(operators["end"], NEVER)[row], begin)
    version = np.where(is_output, NEVER, tensors["version"].to_numpy())
    is_new, tensor_ids = _number_incarnations(tensors["address"].to_numpy(), time, begin, is_output, version)
    # A view is a new tensor of a storage that its operator has read, so its storage is not new.
    storage = tensors["storage"].to_numpy()
    _, storage_ids = _number_incarnations(storage, time, begin, is_output & is_new, None)
    storage_ids += tensor_ids.max(initial=0)  # PyTorch numbers both with the same counter
    return tensors.select(
        operators["row"].gather(tensors["operator"]).alias("node"),
        "io",
        "index",
        "item",
        pl.Series("tensor_id", tensor_ids),
        pl.Series("storage_id", np.where(storage == 0, 0, storage_ids)),
        "version",
        "offset",
        *tensors.columns[tensors.columns.index("numel") :],
    )


def _number_incarnations(
    address: Array, time: Array, begin: Array, is_created: Array, version: Array | None
) -> tuple[NDArray[np.bool_], Array]:
    """Number the objects that successively occupy memory addresses; return a mask of new objects, and all numbers.

    An object is new when its address occurs first; when an operator created it (``is_created``) and the address was
    last used before the operator began; and when an input has an older version than before.
    """
    is_new, number = _native.observer_incarnations(address, time, begin, is_created, version)
    return is_new.view(np.bool_), number
