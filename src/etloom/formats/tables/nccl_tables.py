"""Builds events, comms and groups tables from collectives that NCCL's profilers recorded."""

from __future__ import annotations

import json
import re
from typing import Any

import polars as pl

from etloom.core.categories import NCCL_COLLECTIVE, parse_collective
from etloom.core.schema import Stat
from etloom.formats.tables.building import build_rows, sort_events

DETAILS = ("algorithm", "protocol", "channels", "message_bytes", "algo_gb_per_s", "bus_gb_per_s", "timing")
"""Keys of ``events.args`` of a communication, as far as the file states them.

message_bytes is the size as nccl-tests counts it, and the bandwidths are relative to it.
"""
_SCALED = {"all_gather": "in_nelems", "reduce_scatter": "out_nelems"}
"""Collectives whose count NCCL states per rank -> the column of the count; the other column is that times the ranks."""


def format_hash(communicator: Any) -> str | None:
    """Return the hash of a communicator as hexadecimal text, from a number or text; None for anything else."""
    if isinstance(communicator, bool) or not isinstance(communicator, int | str):
        return None
    text = str(communicator)
    try:
        number = int(text, 16 if text.lower().startswith("0x") else 10)
    except ValueError:
        return text or None
    return f"{number % (1 << 64):#018x}"


def count_elements(name: str, count: int | None, size: int | None) -> dict[str, int | None]:
    """Return in_nelems and out_nelems of a collective (elements per rank) from NCCL's count and the group size.

    Without the number of ranks, both are None of all-gather and reduce-scatter: a size of one rank would pass for the
    whole.
    """
    collective = parse_collective(f"nccl:{name}")
    known = _SCALED.get(collective or "")
    if known is None:
        return {"in_nelems": count, "out_nelems": count}
    if count is None or size is None:
        return {"in_nelems": None, "out_nelems": None}
    other = "out_nelems" if known == "in_nelems" else "in_nelems"
    return {known: count, other: count * size}


def build_communication_tables(
    rows: list[dict[str, Any]], others: pl.DataFrame, stats: list[Stat]
) -> dict[str, pl.DataFrame]:
    """Build the events, comms and groups tables from collectives that NCCL's profilers recorded.

    Args:
        rows: Communications: name, ts and dur (ns; None if unknown), pid, tid, position; details (`DETAILS` and other
            facts that the file states); columns of comms, where pg_name is the communicator.
        others: Events of other categories, with ``position``.
        stats: Receives rows about values that no column can hold.
    """
    texts = ("name", "args", "collective", "pg_name", "dtype")
    columns = (
        *(
            "name",
            "ts",
            "dur",
            "pid",
            "tid",
            "position",
            "args",
            "collective",
            "pg_name",
            "group_size",
            "seq",
        ),
        *("dtype", "in_nelems", "out_nelems", "peer", "comms_id", "bytes"),
    )
    schema = {name: pl.String if name in texts else pl.Int64 for name in columns} | {"comms_id": pl.UInt64}
    flat = [
        {
            **row,
            "args": json.dumps({key: value for key, value in row["details"].items() if value is not None}),
            "collective": parse_collective(f"nccl:{row['name']}") or row["name"].lower(),
            "comms_id": _parse_hash(row.get("pg_name")),
        }
        for row in rows
    ]
    frame, lost = build_rows(flat, schema)
    stats += [
        Stat("read.wrong_type", "data_loss", count, f"comms.{name} has values of a wrong type: now null")
        for name, count in lost.items()
    ]
    is_event = ("name", "ts", "dur", "pid", "tid", "position", "args")
    events = frame.select(*is_event, cat=pl.lit(NCCL_COLLECTIVE), ph=pl.lit("X"))
    events = sort_events(pl.concat([events, others], how="diagonal_relaxed")).with_row_index("id")
    ids = events.select("position", event="id")
    comms = frame.join(ids, on="position", how="left").drop(*is_event).with_row_index("id")
    groups = frame.group_by("pg_name", maintain_order=True).agg(size=pl.col("group_size").max())
    return {"events": events, "comms": comms, "groups": groups.drop_nulls("pg_name")}


def _parse_hash(text: str | None) -> int | None:
    match = re.fullmatch(r"0x([0-9a-f]{16})", text or "")
    return int(match[1], 16) if match is not None else None
