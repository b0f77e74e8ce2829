"""The file of etloom's own observer: operators with their times, tensors and process groups, from a job of any end.

Version 1, plain or gzip (docs/observer-format.md). A file whose process was killed is read up to its last record;
damaged chunks are left out and counted. Every operator is a node and an event: the node has the root nodes and ids
of PyTorch's execution trace, the event its times, on the OS thread where it began.

A tensor's id is that of one tensor, not of its address: an output that nothing inside its operator has touched
before is a new one.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from etloom.readers import _comms, _et_comms, _observer_arguments, _observer_file
from etloom.readers._observer_file import BEGIN, END, NAME, NOTE, TEXT, WINDOW, Records
from etloom.readers._tables import timeline, trace_of
from etloom.trace import Stat, Trace

_ROOTS = "[pytorch|profiler|execution_trace|%s]"
_GROUP_RECORD = "## process_group:init ##"
_LATE = np.iinfo(np.int64).max
_COUNTERS = (
    ("no_space", "data_loss", "operators that the cap or a full disk left out"),
    ("no_dictionary", "data_loss", "names or argument lists beyond the share of the dictionary"),
    ("arguments_left", "data_loss", "argument lists too long for a record"),
    ("lists_cut", "data_loss", "lists cut to 4,096 items"),
    ("failed", "data_loss", "argument lists that torch would not show"),
    ("reentrant", "data_loss", "operators that the observer itself caused"),
    ("raised", "info", "operators that ended by an exception"),
    ("ended_elsewhere", "info", "scopes that ended on another thread"),
    ("ended_outside", "info", "operators begun before the window"),
    ("unsized", "info", "tensors without plain sizes: nested or symbolic"),
    ("thread_gone", "data_loss", "operators on a thread that was ending"),
    ("overwritten", "info", "chunks of the ring that were used again"),
    ("stuck", "error", "threads that hung inside the observer"),
)


def sniff(head: bytes) -> bool:
    """Whether these are the first bytes of an observer's file."""
    return head.startswith(_observer_file.MAGIC)


def read(source: str | PathLike[str]) -> Trace:
    """The Trace of one file.

    Raises ReadError for a file that cannot be read, is none of the observer or of another version.
    """
    path = Path(source)
    records = _observer_file.load(path)
    stats = records.stats
    known = _observer_file.definitions(records)
    operators = _renamed(_operators(records, known, stats), _notes_of_file(records, known))
    sides = _observer_arguments.of_operators(records, known, operators, stats)
    notes = _notes(records, known, operators)
    nodes = _with_kernels(_with_sides(_nodes(operators, stats), operators["row"], sides), notes)
    tensors = _tensors(sides.tensors, operators)
    comms = _observer_arguments.communication(nodes, tensors, notes, sides, stats)
    header = records.header
    stats += [
        (f"read.observer_{name}", severity, min(int(header["counters"][i]), _LATE), meaning)
        for i, (name, severity, meaning) in enumerate(_COUNTERS)
    ]
    still_open = int(operators["end"].is_null().sum())
    stats.append(("read.open_operators", "info", still_open, "had not ended when the file or window did"))
    if not header["closed"]:
        stats.append(("read.unfinished_file", "info", 1, "its process was killed, or still writes"))
    stats.append(("read.nodes", "info", operators.height, "operators in the file"))
    tables = {
        "events": _events(operators, records),
        "nodes": nodes,
        "tensors": tensors,
        "comms": comms,
        "groups": _comms.groups(_et_comms.group_config(nodes)),
    }
    return trace_of(tables, _meta(path, records, sides.rank), stats)


def _operators(records: Records, known: Any, stats: list[Stat]) -> pl.DataFrame:
    """One row an operator, by handle: what its begin and its end say. `row`: its row of the nodes table."""
    words, begin, end = records.words, records.of(BEGIN), records.of(END)
    at = records.at[begin]
    packed = words[at + 5]
    names = _names(records, known, begin, (packed & 0xFFFFFFFF).astype(np.int64))
    frame = pl.DataFrame(
        {
            "handle": words[at + 2],
            "start": words[at + 1].astype(np.int64),
            "above": words[at + 3],
            "seq_id": words[at + 4].astype(np.int64),
            "fw_tid": ((packed >> 32) & 0xFFFF).astype(np.int64),
            "scope": ((packed >> 48) & 0xFF).astype(np.int64),
            "asynchronous": (records.flags[begin] & 1) == 1,
            "rf_tid": records.rf_tid[begin],
            "os_tid": records.os_tid[begin],
            "begin": begin,
            **names,
        }
    )
    at = records.at[end]
    ends = pl.DataFrame(
        {
            "handle": words[at + 2],
            "end": words[at + 1].astype(np.int64),
            "raised": (records.flags[end] & 1) == 1,
            "ended": end,
        }
    )
    once, ends_once = (
        frame.unique("handle", keep="first", maintain_order=True),
        ends.unique("handle", keep="first"),
    )
    twice = frame.height - once.height
    stats.append(("read.duplicate_node_id", "error", twice, "operators of a handle that another one has"))
    joined = once.join(ends_once, on="handle", how="left").sort("handle")
    alone = ends_once.join(once, on="handle", how="anti").height
    stats.append(("read.end_without_begin", "info", alone, "their begin is not in the file"))
    shift = int(records.header["wall_ns"]) - int(records.header["mono_ns"])
    backwards = int((joined["end"] < joined["start"]).sum())
    stats.append(("read.negative_duration", "error", backwards, "operators that end before they begin: 0 ns"))
    threads = joined["rf_tid"].n_unique()
    ended = pl.when(pl.col("end") < pl.col("start")).then("start").otherwise("end")
    return joined.with_columns(
        pl.col("start") + shift,
        (ended + shift).alias("end"),
        row=pl.int_range(pl.len(), dtype=pl.Int64) + 1 + threads,
    )


def _names(records: Records, known: Any, begin: npt.NDArray[np.int64], ids: Any) -> dict[str, pl.Series]:
    """The columns name and op_schema of these operators."""
    texts = {
        (stream << 32) | number: text
        for (kind, stream), defined in known.items()
        if kind == NAME
        for number, text in defined.items()
    }
    keys = np.array(sorted(texts), np.int64)
    parts = [texts[key].decode("utf-8", "replace").split("\0") for key in keys.tolist()]
    wanted = (records.stream[begin] << 32) | ids
    place = np.searchsorted(keys, wanted)
    place[place == len(keys)] = 0
    fine = keys[place] == wanted if len(keys) else np.zeros(len(wanted), bool)
    if not fine.all():
        lost = int((~fine).sum())
        records.stats.append(
            ("read.unnamed_operator", "data_loss", lost, "the definition of their name is lost")
        )
    at = pl.Series(np.where(fine, place, len(keys)))
    return {
        "name": pl.Series([part[0] for part in parts] + ["unknown"]).cast(pl.Categorical).gather(at),
        "op_schema": pl.Series(
            [part[-1] if len(part) > 2 else None for part in parts] + [None], dtype=pl.String
        )
        .cast(pl.Categorical)
        .gather(at),
    }


def _nodes(operators: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
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
    stats.append(("read.missing_parent", "info", lost, "began before what the file holds"))
    parent = np.where(fine, place + 1 + len(threads), operators["rf_tid"].replace_strict(rank).to_numpy())
    ended = operators["end"].fill_null(_LATE).to_numpy()
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
            "name": [_ROOTS % "process", *[_ROOTS % "thread"] * len(threads)],
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
    ).with_columns(_absent("seq_id", -1), _absent("fw_tid", 0), _absent("fw_parent", 0), _absent("rf_id", 0))


def _absent(column: str, mark: int) -> pl.Expr:
    return pl.when(pl.col(column) != mark).then(column).alias(column)


def _events(operators: pl.DataFrame, records: Records) -> pl.DataFrame:
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
        _absent("seq_id", -1),
        _absent("fw_tid", 0).alias("fwd_tid"),
        position=pl.int_range(pl.len(), dtype=pl.Int64),
        ph=pl.lit("X").cast(pl.Categorical),
    )
    # The record of process groups is made by the observer, and no part of the job.
    frame = frame.filter(pl.col("name").cast(pl.String) != _GROUP_RECORD)
    return timeline(frame).with_row_index("id")


def _with_sides(nodes: pl.DataFrame, rows: Any, sides: Any) -> pl.DataFrame:
    """nodes with inputs, outputs and their types."""
    roots = nodes.height - len(rows)
    empty = pl.Series([None] * roots, dtype=pl.Categorical)
    columns = {
        name: pl.concat([empty, column.cast(pl.Categorical)]).fill_null("[]")
        for name, column in sides.columns.items()
    }
    return nodes.with_columns(**columns)


def _tensors(found: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """The tensors table, in which an id is that of one tensor and not of an address.

    found: its columns with `operator` (place of the operator), `address` and `storage` in place of ids.
    """
    place = found["operator"].to_numpy()
    begin = operators["start"].to_numpy()[place]
    output = found["io"].to_numpy() == 1
    when = np.where(output, operators["end"].fill_null(_LATE).to_numpy()[place], begin)
    version = np.where(output, _LATE, found["version"].to_numpy())
    fresh, tensors = _incarnations(found["address"].to_numpy(), when, begin, output, version)
    # A view is a new tensor of a storage that its operator has read: that is not new.
    _, storages = _incarnations(found["storage"].to_numpy(), when, begin, output & fresh, None)
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


def _incarnations(address: Any, when: Any, begin: Any, made: Any, version: Any) -> tuple[Any, Any]:
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
        fresh[1:] |= (of[1:] < of[:-1]) & (of[:-1] != _LATE)
    number, which = np.empty(len(order), np.int64), np.empty(len(order), bool)
    number[order], which[order] = np.cumsum(fresh), fresh
    return which, number


def _notes(records: Records, known: Any, operators: pl.DataFrame) -> dict[int, dict[str, Any]]:
    """Row of nodes -> what a note says of the operator: facts of a communication, or of a compiled kernel."""
    note = records.of(NOTE)
    if not len(note):
        return {}
    rows = dict(operators.select("handle", "row").iter_rows())
    found: dict[int, dict[str, Any]] = {}
    for place, stream, number in zip(
        records.at[note].tolist(), records.stream[note].tolist(), records.id[note].tolist(), strict=True
    ):
        row = rows.get(int(records.words[place + 1]))
        try:
            said = json.loads(known.get((TEXT, stream), {}).get(number, b"null"))
        except ValueError:
            continue
        if row is not None and isinstance(said, dict):
            found[row] = said
    return found


def _notes_of_file(records: Records, known: Any) -> dict[str, Any]:
    """What notes say that belong to no operator."""
    found: dict[str, Any] = {}
    for row in records.of(NOTE).tolist():
        if records.words[records.at[row] + 1] == 0:
            text = known.get((TEXT, int(records.stream[row])), {}).get(int(records.id[row]), b"null")
            try:
                said = json.loads(text)
            except ValueError:
                continue
            found.update(said if isinstance(said, dict) else {})
    return found


def _renamed(operators: pl.DataFrame, notes: dict[str, Any]) -> pl.DataFrame:
    """A step that was not whole when the window closed must not pass for one."""
    step = notes.get("unfinished_step")
    if not isinstance(step, int):
        return operators
    partial = pl.when(pl.col("name").cast(pl.String) == f"ProfilerStep#{step}")
    renamed = partial.then(pl.lit(f"etloom:unfinished step {step}")).otherwise(pl.col("name").cast(pl.String))
    return operators.with_columns(name=renamed.cast(pl.Categorical))


def _with_kernels(nodes: pl.DataFrame, notes: dict[int, dict[str, Any]]) -> pl.DataFrame:
    names = ("kernel_backend", "kernel_file")
    rows = [
        {"id": row, **{name: str(said[name]) for name in names if name in said}}
        for row, said in notes.items()
        if "kernel_backend" in said
    ]
    frame = pl.DataFrame(rows, schema={"id": pl.Int64, **dict.fromkeys(names, pl.String)})
    return nodes.join(frame, on="id", how="left", maintain_order="left")


def _meta(path: Path, records: Records, rank: int | None) -> dict[str, Any]:
    header = records.header
    windows = records.words[records.at[records.of(WINDOW)] + 1].astype(np.int64)
    told = {name: header[name].decode("utf-8", "replace") for name in ("host", "torch")}
    execution_trace = {
        "schema": "1.1.1-chakra.0.0.4",
        "pid": int(header["pid"]),
        "time": pl.Series([int(header["wall_ns"])])
        .cast(pl.Datetime("ns"))
        .dt.to_string("%Y-%m-%d %H:%M:%S")[0],
        "start_ts": int(header["mono_ns"]) // 1_000_000,
    }
    if len(windows):
        shift = int(header["wall_ns"]) - int(header["mono_ns"])
        execution_trace["finish_ts"] = (int(windows.max()) - shift) // 1_000_000
    meta = {
        "files": [str(path)],
        "formats": ["observer"],
        "clock": "epoch",
        "rank": rank,
        "schema_version": execution_trace["schema"],
        "header": {
            "execution_trace": execution_trace,
            "observer": {
                **told,
                "detail": bool(header["detail"]),
                "ring": bool(header["ring"]),
                "windows": int((records.flags[records.of(WINDOW)] == 1).sum()),
            },
        },
    }
    return {key: value for key, value in meta.items() if value is not None}
