"""Notes of an observer file, about the file and about single operators, and what they change in the tables."""

from __future__ import annotations

from typing import Any

import polars as pl

from etloom.core.steps import STEP_PATTERN, format_step, is_step, parse_step
from etloom.formats.observer.records import NOTE, Definitions, Records, read_json

_OVERWRITTEN_COUNTER = 14  # index in the header's counters


def read_operator_notes(
    records: Records, definitions: Definitions, operators: pl.DataFrame
) -> dict[int, dict[str, Any]]:
    """Return row of nodes -> note about the operator: facts about communication, or about a compiled kernel."""
    note_rows = records.select_rows(NOTE)
    if not len(note_rows):
        return {}
    handle_rows = dict(operators.select("handle", "row").iter_rows())
    notes: dict[int, dict[str, Any]] = {}
    for record in note_rows.tolist():
        row = handle_rows.get(int(records.words[records.at[record] + 1]))
        note = _read_note(records, definitions, record)
        if row is not None and note is not None:
            notes[row] = note
    return notes


def read_file_notes(records: Records, definitions: Definitions) -> dict[str, Any]:
    """Return the notes that do not belong to an operator, merged into one object."""
    notes: dict[str, Any] = {}
    for record in records.select_rows(NOTE).tolist():
        if records.words[records.at[record] + 1] == 0:
            notes.update(_read_note(records, definitions, record) or {})
    return notes


def _read_note(records: Records, definitions: Definitions, record: int) -> dict[str, Any] | None:
    return read_json(definitions, int(records.stream[record]), int(records.id[record]))


def rename_unfinished_step(operators: pl.DataFrame, notes: dict[str, Any]) -> pl.DataFrame:
    """Rename the step that was incomplete when the window closed, so that it does not count as a step."""
    step = notes.get("unfinished_step")
    if not isinstance(step, int):
        return operators
    name = pl.col("name").cast(pl.String)
    is_unfinished = name == format_step(step)
    new_name = pl.when(is_unfinished).then(pl.lit(f"etloom:unfinished step {step}")).otherwise(name)
    return operators.with_columns(name=new_name.cast(pl.Categorical))


def summarize_ring_buffer(
    operators: pl.DataFrame, records: Records
) -> tuple[pl.DataFrame, dict[str, Any] | None]:
    """Rename steps that the ring buffer partly overwrote, and summarize what it holds.

    Returns:
        The operators with new names, and None where nothing was overwritten, else:

        - whole_since_ns: time since the epoch, from which on everything is complete.
        - overwritten_ns: time from the begin of the first window to there.
        - overwritten_operators: number of operators.
        - whole_steps: numbers of the complete steps, ascending, without the one in which the process was killed.
    """
    header = records.header
    until, count = int(header["overwritten_ns"]), int(header["counters"][_OVERWRITTEN_COUNTER])
    if not until:
        return operators, None
    since = until + int(header["wall_ns"]) - int(header["mono_ns"])
    name = pl.col("name").cast(pl.String)
    is_partial = is_step(name) & (pl.col("start") <= since)
    partial_name = pl.lit("etloom:overwritten step ") + name.str.extract(STEP_PATTERN)
    new_name = pl.when(is_partial).then(partial_name).otherwise(name)
    finished = operators.filter(pl.col("end").is_not_null())
    steps = finished.select(parse_step(new_name)).to_series()
    return operators.with_columns(name=new_name.cast(pl.Categorical)), {
        "overwritten_operators": count,
        "overwritten_ns": until - int(header["first_ns"]),
        "whole_since_ns": since,
        "whole_steps": steps.drop_nulls().sort().to_list(),
    }


def add_kernel_columns(nodes: pl.DataFrame, notes: dict[int, dict[str, Any]]) -> pl.DataFrame:
    """Add the columns kernel_backend and kernel_file of compiled kernels to the nodes table."""
    names = ("kernel_backend", "kernel_file")
    rows = [
        {"id": row, **{name: str(note[name]) for name in names if name in note}}
        for row, note in notes.items()
        if "kernel_backend" in note
    ]
    columns = pl.DataFrame(rows, schema={"id": pl.Int64, **dict.fromkeys(names, pl.String)})
    return nodes.join(columns, on="id", how="left", maintain_order="left")
