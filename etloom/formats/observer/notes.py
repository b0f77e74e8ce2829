"""What notes of an observer's file say, of the file and of single operators."""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from etloom.core.steps import STEP_PATTERN, format_step, is_step, parse_step
from etloom.formats.observer.records import NOTE, TEXT, Records

_OVERWRITTEN_COUNTER = 14  # place of the counter


def read_operator_notes(records: Records, known: Any, operators: pl.DataFrame) -> dict[int, dict[str, Any]]:
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


def read_file_notes(records: Records, known: Any) -> dict[str, Any]:
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


def rename_unfinished_step(operators: pl.DataFrame, notes: dict[str, Any]) -> pl.DataFrame:
    """A step that was not whole when the window closed must not pass for one."""
    step = notes.get("unfinished_step")
    if not isinstance(step, int):
        return operators
    partial = pl.when(pl.col("name").cast(pl.String) == format_step(step))
    renamed = partial.then(pl.lit(f"etloom:unfinished step {step}")).otherwise(pl.col("name").cast(pl.String))
    return operators.with_columns(name=renamed.cast(pl.Categorical))


def summarize_ring_buffer(
    operators: pl.DataFrame, records: Records
) -> tuple[pl.DataFrame, dict[str, Any] | None]:
    """Operators in which no step that the ring overwrote in part passes for a whole one, and what the ring holds.

    whole_since_ns: since the epoch, as start and end of `operators`. overwritten_ns: from the begin of the first window
    to there. whole_steps: their numbers, ascending, without the one in which the process was killed. None where nothing
    was overwritten.
    """
    header = records.header
    until, lost = int(header["overwritten_ns"]), int(header["counters"][_OVERWRITTEN_COUNTER])
    if not until:
        return operators, None
    since = until + int(header["wall_ns"]) - int(header["mono_ns"])
    name = pl.col("name").cast(pl.String)
    partial = is_step(name) & (pl.col("start") <= since)
    renamed = (
        pl.when(partial)
        .then(pl.lit("etloom:overwritten step ") + name.str.extract(STEP_PATTERN))
        .otherwise(name)
    )
    ended = operators.filter(pl.col("end").is_not_null())
    steps = ended.select(parse_step(renamed)).to_series().drop_nulls()
    return operators.with_columns(name=renamed.cast(pl.Categorical)), {
        "overwritten_operators": lost,
        "overwritten_ns": until - int(header["first_ns"]),
        "whole_since_ns": since,
        "whole_steps": steps.sort().to_list(),
    }


def add_kernel_columns(nodes: pl.DataFrame, notes: dict[int, dict[str, Any]]) -> pl.DataFrame:
    names = ("kernel_backend", "kernel_file")
    rows = [
        {"id": row, **{name: str(said[name]) for name in names if name in said}}
        for row, said in notes.items()
        if "kernel_backend" in said
    ]
    frame = pl.DataFrame(rows, schema={"id": pl.Int64, **dict.fromkeys(names, pl.String)})
    return nodes.join(frame, on="id", how="left", maintain_order="left")
