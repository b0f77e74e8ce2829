"""Join the traces of one process that were recorded one after another, such as SGLang's prefill and decode traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from etloom.core.arrays import rows_of_ids
from etloom.core.categories import recorded_extent
from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.formats.tables.building import sort_events

_CONCATENATED_META = ("files", "metadata_events")


def get_recorder(trace: Trace) -> str:
    """Return the name of the profiler that recorded a trace; else its format."""
    header = trace.meta.get("header")
    product = header.get("product") if isinstance(header, dict) else None
    return product[:60] if isinstance(product, str) and product else " ".join(trace.meta.get("formats", ()))


def join_parts(traces: Sequence[Trace]) -> list[Trace]:
    """Join the Kineto traces of a rank into a single trace; return the rank's other traces and the joined trace.

    A trace that overlaps an earlier one in time, or does not share its clock, is not a part of the same recording: it
    is left out, and counted.
    """
    profiles = [trace for trace in traces if get_recorder(trace) == "kineto"]
    if len(profiles) < 2:
        return list(traces)
    start, end = recorded_extent()
    spans = {id(trace): trace.events.select(start=start, end=end).row(0) for trace in profiles}
    # The longest recording first, so that a copy of a part of it is what is left out.
    parts: list[Trace] = []
    others: list[Trace] = []
    for trace in sorted(profiles, key=lambda trace: trace.events.height, reverse=True):
        fits = all(_can_follow(trace, part, spans[id(trace)], spans[id(part)]) for part in parts)
        (parts if fits else others).append(trace)
    parts.sort(key=lambda trace: spans[id(trace)][0] or 0)
    joined = parts[0] if len(parts) == 1 else concat_traces(parts)
    used = ", ".join(name_files(part) for part in parts)
    stats = [Stat("job.joined_parts", "info", len(parts) if len(parts) > 1 else 0, used)] + [
        Stat(
            "job.duplicate_rank_files",
            "data_loss",
            1,
            f"{name_files(other)} is ignored, {used} was read: they overlap in time, or have no common clock",
        )
        for other in others
    ]
    rest = [trace for trace in traces if not any(trace is profile for profile in profiles)]
    return [*rest, joined.with_stats(stats)]


def _can_follow(
    trace: Trace, part: Trace, span: tuple[int | None, int | None], other: tuple[int | None, int | None]
) -> bool:
    """Return whether two traces do not overlap in time; False unless both have epoch clocks."""
    if trace.meta.get("clock") != "epoch" or part.meta.get("clock") != "epoch":
        return False
    (start, end), (other_start, other_end) = span, other
    if start is None or end is None or other_start is None or other_end is None:
        return False
    return end <= other_start or other_end <= start


def name_files(trace: Trace) -> str:
    return ", ".join(str(file).rpartition("/")[2] for file in trace.meta.get("files", ()))


def concat_traces(parts: Sequence[Trace]) -> Trace:
    """Concatenate the tables of traces; ids and references are renumbered, and events sorted again."""
    offsets: dict[str, int] = dict.fromkeys(TABLES, 0)
    frames: dict[str, list[pl.DataFrame]] = {}
    position = 0
    for part in parts:
        for name, table in TABLES.items():
            frame = part.table(name)
            if frame.is_empty():
                continue
            shifts = {"id": offsets[name]} | {
                column.name: offsets[column.refers] for column in table.columns if column.refers is not None
            }
            if name == "events":
                shifts["position"] = position
            frames.setdefault(name, []).append(
                frame.with_columns(
                    pl.col(column) + pl.lit(shift, dtype=pl.UInt32)
                    for column, shift in shifts.items()
                    if column in frame.columns
                )
            )
        for name in TABLES:
            ids = part.table(name)
            if "id" in ids.columns and ids.height:
                offsets[name] += int(ids["id"].max()) + 1  # type: ignore[arg-type]
        position += int(part.events["position"].max() or 0) + 1  # type: ignore[arg-type]
    tables = {name: pl.concat(rows) for name, rows in frames.items()}
    for name in ("groups", "threads"):
        if name in tables:
            tables[name] = tables[name].unique(maintain_order=True)
    facts: list[dict[str, Any]] = [{**part.meta} for part in parts]
    meta = {**facts[-1], **facts[0]}
    for key in _CONCATENATED_META:
        meta[key] = [entry for part_facts in facts for entry in part_facts.get(key, ())]
    return Trace(_renumber_events(tables), meta)


def _renumber_events(tables: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Sort the events by time, renumber their ids in this order, and update all references to them."""
    ordered = sort_events(tables["events"])
    numbered = ordered.with_columns(id=pl.int_range(pl.len(), dtype=pl.UInt32))

    def renumber(column: pl.Series) -> pl.Series:
        rows = pl.Series(column.name, rows_of_ids(ordered, column), dtype=pl.Int64)
        return rows.set(rows < 0, None).cast(pl.UInt32)

    renumbered = {}
    for name, frame in tables.items():
        frame = numbered if name == "events" else frame
        columns = [
            column.name
            for column in TABLES[name].columns
            if column.refers == "events" and frame[column.name].count()
        ]
        frame = frame.with_columns(renumber(frame[column]) for column in columns)
        renumbered[name] = frame.drop_nulls(TABLES[name].required) if columns else frame
    return renumbered
