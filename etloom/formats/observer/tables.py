"""The tables nodes, events and tensors of an observer's file, from its operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from etloom.core.schema import Stat
from etloom.formats.observer.records import Records
from etloom.formats.tables.building import sort_events

NEVER = np.iinfo(np.int64).max
_ROOT_NAME = "[pytorch|profiler|execution_trace|%s]"
_GROUP_INIT_NAME = "## process_group:init ##"


def build_nodes(operators: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """The nodes without their arguments: the roots of the process and of its threads, then the operators."""
    threads = operators["rf_tid"].unique().sort()
    rank = dict(zip(threads.to_list(), range(1, len(threads) + 1), strict=True))
    handles = operators["handle"].to_numpy()
    above = operators["above"].to_numpy()
    place = np.searchsorted(handles, above)
    place[place == len(handles)] = 0
    fine = handles[place] == above if len(handles) else np.zeros(0, bool)
    fine &= above < handles  # what encloses began earlier: no circles in a damaged file
    lost = int(((above != 0) & ~fine).sum())
    stats.append(Stat("read.missing_parent", "info", lost, "began before what the file holds"))
    parent = np.where(fine, place + 1 + len(threads), operators["rf_tid"].replace_strict(rank).to_numpy())
    ended = operators["end"].fill_null(NEVER).to_numpy()
    # Of those that ended at the same time the inner one, which began later, comes first.
    order = np.empty(len(ended), np.int64)
    order[np.lexsort((-np.arange(len(ended)), ended))] = np.arange(len(ended))
    own = operators.select(
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
    count = len(threads) + 1
    roots = pl.DataFrame(
        {
            "id": range(count),
            "et_id": range(1, count + 1),
            "name": [_ROOT_NAME % "process", *[_ROOT_NAME % "thread"] * len(threads)],
            "parent": [None] + [0] * len(threads),
            "recorded_parent": [1] * count,
            "file_order": [len(ended) + count - 1, *range(len(ended), len(ended) + count - 1)],
            "scope": [7] * count,
            "tid": [0, *threads],
            "fw_tid": [0] * count,
            "fw_parent": [0] * count,
            "seq_id": [-1] * count,
            "rf_id": [0] * count,
        }
    )
    text = pl.col("name", "op_schema").cast(pl.Categorical)
    return pl.concat(
        [roots.with_columns(op_schema=pl.lit(None, pl.String)).with_columns(text), own.with_columns(text)],
        how="diagonal_relaxed",
    ).with_columns(
        _null_where("seq_id", -1),
        _null_where("fw_tid", 0),
        _null_where("fw_parent", 0),
        _null_where("rf_id", 0),
    )


def _null_where(column: str, mark: int) -> pl.Expr:
    return pl.when(pl.col(column) != mark).then(column).alias(column)


def build_events(operators: pl.DataFrame, records: Records) -> pl.DataFrame:
    scope = operators["scope"]
    kinds = pl.when(scope == 7).then(pl.lit("user_annotation")).otherwise(pl.lit("cpu_op"))
    frame = operators.select(
        kinds.cast(pl.Categorical).alias("cat"),
        "name",
        pl.col("start").alias("ts"),
        (pl.col("end") - pl.col("start")).alias("dur"),
        pl.lit(int(records.header["pid"]), pl.Int64).alias("pid"),
        pl.col("os_tid").alias("tid"),
        pl.col("handle").cast(pl.Int64, strict=False).alias("rf_id"),
        _null_where("seq_id", -1),
        _null_where("fw_tid", 0).alias("fwd_tid"),
        position=pl.int_range(pl.len(), dtype=pl.Int64),
        ph=pl.lit("X").cast(pl.Categorical),
    )
    # The record of process groups is made by the observer, and no part of the job.
    frame = frame.filter(pl.col("name").cast(pl.String) != _GROUP_INIT_NAME)
    return sort_events(frame).with_row_index("id")


def add_arguments(nodes: pl.DataFrame, rows: Any, sides: Any) -> pl.DataFrame:
    """nodes with inputs, outputs and their types."""
    roots = nodes.height - len(rows)
    empty = pl.Series([None] * roots, dtype=pl.Categorical)
    columns = {
        name: pl.concat([empty, column.cast(pl.Categorical)]).fill_null("[]")
        for name, column in sides.columns.items()
    }
    return nodes.with_columns(**columns)


def build_tensors(found: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """The tensors table, in which an id is that of one tensor and not of an address.

    found: its columns with `operator` (place of the operator), `address` and `storage` in place of ids.
    """
    place = found["operator"].to_numpy()
    begin = operators["start"].to_numpy()[place]
    output = found["io"].to_numpy() == 1
    when = np.where(output, operators["end"].fill_null(NEVER).to_numpy()[place], begin)
    version = np.where(output, NEVER, found["version"].to_numpy())
    fresh, tensors = _number_incarnations(found["address"].to_numpy(), when, begin, output, version)
    # A view is a new tensor of a storage that its operator has read: that is not new.
    _, storages = _number_incarnations(found["storage"].to_numpy(), when, begin, output & fresh, None)
    storages += tensors.max(initial=0)  # PyTorch counts both by one counter
    return found.select(
        operators["row"].gather(found["operator"]).alias("node"),
        "io",
        "index",
        "item",
        pl.Series("tensor_id", tensors),
        pl.Series("storage_id", np.where(found["storage"].to_numpy() == 0, 0, storages)),
        *found.columns[found.columns.index("version") :],
    ).sort("node", "io", "index", "item", maintain_order=True)


def _number_incarnations(address: Any, when: Any, begin: Any, made: Any, version: Any) -> tuple[Any, Any]:
    """Which rows see a new thing at their address, and its number from 1.

    A new one is there the first time, where an operator that has `made` it found the address untouched since before
    it began, and where an input is of an older version than before.
    """
    order = np.lexsort((when, address))
    key, time = address[order], when[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (key[1:] != key[:-1]) | (made[order][1:] & (time[:-1] < begin[order][1:]))
    if version is not None:
        of = version[order]
        fresh[1:] |= (of[1:] < of[:-1]) & (of[:-1] != NEVER)
    number, which = np.empty(len(order), np.int64), np.empty(len(order), bool)
    number[order], which[order] = np.cumsum(fresh), fresh
    return which, number
