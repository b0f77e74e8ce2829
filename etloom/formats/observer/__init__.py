"""The file of etloom's own observer: operators with their times, tensors and process groups, from a job of any end.

Version 1, plain or gzip (docs/observer-format.md). A file whose process was killed is read up to its last record;
damaged chunks are left out and counted. Every operator is a node and an event: the node has the root nodes and ids
of PyTorch's execution trace, the event its times, on the OS thread where it began.

A tensor's id is that of one tensor, not of its address: an output that nothing inside its operator has touched
before is a new one.
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
from etloom.formats.observer import arguments
from etloom.formats.observer import notes as _observer_notes
from etloom.formats.observer import records as _observer_file
from etloom.formats.observer import tables as _observer_tables
from etloom.formats.observer.records import BEGIN, END, NAME, WINDOW, Records
from etloom.formats.tables import comms_table
from etloom.formats.tables.building import build_trace

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
    records = _observer_file.load_records(path)
    stats = records.stats
    known = _observer_file.read_definitions(records)
    operators = _observer_notes.rename_unfinished_step(
        _build_operators(records, known, stats), _observer_notes.read_file_notes(records, known)
    )
    operators, ring = _observer_notes.summarize_ring_buffer(operators, records)
    sides = arguments.decode_arguments(records, known, operators, stats)
    notes = _observer_notes.read_operator_notes(records, known, operators)
    bare = _observer_tables.add_arguments(
        _observer_tables.build_nodes(operators, stats), operators["row"], sides
    )
    nodes = _observer_notes.add_kernel_columns(bare, notes)
    tensors = _observer_tables.build_tensors(sides.tensors, operators)
    comms = arguments.build_comms_table(nodes, tensors, notes, sides, stats)
    header = records.header
    stats += [
        Stat(
            f"read.observer_{name}",
            severity,
            min(int(header["counters"][i]), _observer_tables.NEVER),
            meaning,
        )
        for i, (name, severity, meaning) in enumerate(_COUNTERS)
    ]
    still_open = int(operators["end"].is_null().sum())
    stats.append(Stat("read.open_operators", "info", still_open, "had not ended when the file or window did"))
    if not header["closed"]:
        stats.append(Stat("read.unfinished_file", "info", 1, "its process was killed, or still writes"))
    if ring is not None:
        before, steps = ring["overwritten_ns"] / 1e9, ring["whole_steps"]
        named = f" ({steps[0]} to {steps[-1]})" if steps else ""
        told = f"of the first {before:.3g} s of the window; the ring holds {len(steps)} whole steps{named}"
        stats.append(Stat("read.overwritten_operators", "info", ring["overwritten_operators"], told))
    stats.append(Stat("read.nodes", "info", operators.height, "operators in the file"))
    tables = {
        "events": _observer_tables.build_events(operators, records),
        "nodes": nodes,
        "tensors": tensors,
        "comms": comms,
        "groups": comms_table.build_groups(communication.read_group_config(nodes)),
    }
    return build_trace(tables, _build_meta(path, records, sides.rank, ring), stats)


def _build_operators(records: Records, known: Any, stats: list[Stat]) -> pl.DataFrame:
    """One row an operator, by handle: what its begin and its end say. `row`: its row of the nodes table."""
    words, begin, end = records.words, records.of(BEGIN), records.of(END)
    at = records.at[begin]
    packed = words[at + 5]
    names = _decode_names(records, known, begin, (packed & 0xFFFFFFFF).astype(np.int64))
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
    stats.append(Stat("read.duplicate_node_id", "error", twice, "operators of a handle that another one has"))
    joined = once.join(ends_once, on="handle", how="left").sort("handle")
    alone = ends_once.join(once, on="handle", how="anti").height
    stats.append(Stat("read.end_without_begin", "info", alone, "their begin is not in the file"))
    shift = int(records.header["wall_ns"]) - int(records.header["mono_ns"])
    backwards = int((joined["end"] < joined["start"]).sum())
    stats.append(
        Stat("read.negative_duration", "error", backwards, "operators that end before they begin: 0 ns")
    )
    threads = joined["rf_tid"].n_unique()
    ended = pl.when(pl.col("end") < pl.col("start")).then("start").otherwise("end")
    return joined.with_columns(
        pl.col("start") + shift,
        (ended + shift).alias("end"),
        row=pl.int_range(pl.len(), dtype=pl.Int64) + 1 + threads,
    )


def _decode_names(
    records: Records, known: Any, begin: npt.NDArray[np.int64], ids: Any
) -> dict[str, pl.Series]:
    """The columns name and op_schema of these operators."""
    texts = {
        (stream << 32) | number: text
        for (kind, stream), defined in known.items()
        if kind == NAME
        for number, text in defined.items()
    }
    keys = np.array(sorted(texts), np.uint64)
    parts = [texts[key].decode("utf-8", "replace").split("\0") for key in keys.tolist()]
    wanted = (records.stream[begin].astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)
    place = np.searchsorted(keys, wanted)
    place[place == len(keys)] = 0
    fine = keys[place] == wanted if len(keys) else np.zeros(len(wanted), bool)
    if not fine.all():
        lost = int((~fine).sum())
        records.stats.append(
            Stat("read.unnamed_operator", "data_loss", lost, "the definition of their name is lost")
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


def _build_meta(
    path: Path, records: Records, rank: int | None, ring: dict[str, Any] | None
) -> dict[str, Any]:
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
        "host": told["host"] or None,
        "rank": rank,
        "schema_version": execution_trace["schema"],
        "header": {
            "execution_trace": execution_trace,
            "observer": {
                **told,
                "detail": bool(header["detail"]),
                "ring": bool(header["ring"]),
                **({} if ring is None else {"overwritten": ring}),
                "windows": int((records.flags[records.of(WINDOW)] == 1).sum()),
            },
        },
    }
    return {key: value for key, value in meta.items() if value is not None}
