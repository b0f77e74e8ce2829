"""Reads the JSON notes in an observer file, about the file or single operators, and applies them to the tables."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import polars as pl

from etloom.core.steps import STEP_PATTERN, format_step, is_step, parse_step
from etloom.formats.observer.records import Records, read_json

_OVERWRITTEN_COUNTER = 14  # index in the header's counters


def read_operator_notes(records: Records, operators: pl.DataFrame) -> dict[int, dict[str, Any]]:
    """Return the JSON notes on operators, by row of nodes: facts about a communication, compiled kernel or tensors."""
    if not records.notes or not operators.height:
        return {}
    handles, first_row = operators["handle"].to_numpy(), operators["row"][0]
    noted = np.array([handle for _, _, handle in records.notes], np.uint64)
    places = np.minimum(np.searchsorted(handles, noted), len(handles) - 1)
    read_note = functools.cache(functools.partial(read_json, records.definitions))  # most texts are repeated
    notes: dict[int, dict[str, Any]] = {}
    for (stream, number, handle), place in zip(records.notes, places.tolist(), strict=True):
        note = read_note(stream, number)
        if note is not None and handles[place] == handle:
            notes[first_row + place] = notes.get(first_row + place, {}) | note
    return notes


def read_file_notes(records: Records) -> dict[str, Any]:
    """Return the notes about the file as a whole, not about an operator, merged into one dict."""
    notes: dict[str, Any] = {}
    for stream, number, handle in records.notes:
        if handle == 0:
            notes.update(read_json(records.definitions, stream, number) or {})
    return notes


def rename_unfinished_step(operators: pl.DataFrame, notes: dict[str, Any]) -> pl.DataFrame:
    """Rename the step annotation that was incomplete when the recording window closed: it must not count as a step."""
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
    """Rename steps that the ring buffer partly overwrote; summarize the overwritten time and the complete steps.

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


def add_value_ranges(nodes: pl.DataFrame, notes: dict[int, dict[str, Any]]) -> pl.DataFrame:
    """Add the ranges of integer inputs to the attributes of nodes, under the name that torch's observer uses."""
    rows = [
        (row, json.dumps({"tensor_range": str(note["tensor_range"])}))
        for row, note in notes.items()
        if "tensor_range" in note
    ]
    ranges = pl.DataFrame(rows, schema={"id": pl.Int64, "range": pl.String}, orient="row")
    both = pl.format("{}, {}", pl.col("attrs").str.head(-1), pl.col("range").str.slice(1))
    return nodes.join(ranges, on="id", how="left", maintain_order="left").select(
        pl.exclude("attrs", "range"), attrs=pl.coalesce(both, "range", "attrs")
    )
