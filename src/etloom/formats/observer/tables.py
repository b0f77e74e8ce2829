"""Builds the tables nodes, events and tensors of an observer file from its operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import _native
from etloom.core.arrays import to_array
from etloom.formats.observer.arguments import OperatorArguments
from etloom.formats.observer.records import Records
from etloom.formats.tables.building import sort_events

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
