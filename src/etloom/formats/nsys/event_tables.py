"""Helpers for the readers of all Nsight Systems activities: event columns, process and thread ids, names."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from etloom.core.schema import Stat
from etloom.formats.nsys.containers import I64, ExportFile
from etloom.formats.tables.building import select_columns

CUPTI = "CUPTI_ACTIVITY_KIND_"

EVENT_COLUMNS = {
    "process": I64,  # globalPid: virtual machine and pid; correlation ids are unique within it
    "ph": pl.Categorical,
    "cat": pl.Categorical,
    "name": pl.Categorical,
    "start": I64,
    "end": I64,
    "pid": I64,
    "tid": I64,
    "device": I64,
    "stream": I64,
    "correlation": I64,
    "rf_id": I64,
    "seq_id": I64,
    "args": pl.Categorical,
}
"""The columns of the events of all `EventTables`; absent ones are null."""


@dataclass
class EventTables:
    """Events of one kind of activity.

    ``sides``: table name -> related rows; their column ``row`` is the index of a row of ``events``.
    """

    events: pl.DataFrame
    sides: dict[str, pl.DataFrame] = field(default_factory=dict)
    stats: list[Stat] = field(default_factory=list)
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Process -> (rank, number of ranks), if these events state them."""


def extract_process(column: str) -> pl.Expr:
    """Return a polars expression that converts globalTids to globalPids by clearing the bits of the thread id."""
    return pl.col(column) & ~0xFFFFFF


def extract_pid(column: str) -> pl.Expr:
    return (pl.col(column) // (1 << 24)) & 0xFFFFFF


def extract_tid(column: str) -> pl.Expr:
    return pl.col(column) & 0xFFFFFF


def select_event_columns(frame: pl.DataFrame, **columns: pl.Expr | pl.Series | None) -> pl.DataFrame:
    """Select `EVENT_COLUMNS`: each from its keyword argument, otherwise from the frame's column, otherwise null."""
    return select_columns(frame, EVENT_COLUMNS, **columns)


def resolve_names(source: ExportFile, frame: pl.DataFrame, *columns: str) -> pl.DataFrame:
    """Replace the string ids in the columns ``columns`` by their texts from the table StringIds."""
    ids = pl.concat([frame[column] for column in columns]).unique().drop_nulls().sort()
    texts = source.read_strings(ids).unique("id", keep="first")
    for column in columns:
        frame = (
            frame.join(
                texts.rename({"id": column, "value": "\0"}), on=column, how="left", maintain_order="left"
            )
            .with_columns(pl.col("\0").alias(column))
            .drop("\0")
        )
    return frame
