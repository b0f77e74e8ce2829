"""The comms and groups tables: normalized collective names, sizes in bytes, complete rank lists, process groups."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import polars as pl

from etloom.core import categories
from etloom.core.schema import Stat

_MAX_GROUP_SIZE = 1 << 20
"""The largest size of a group whose ranks are listed; no real group has as many."""

P2P = ("send", "recv", "send_recv")


def normalize_comms(
    comms: pl.DataFrame, stats: list[Stat], collective: pl.Series | None = None
) -> pl.DataFrame:
    """Normalize recorded communication rows: collective names, complete rank lists, size in bytes, and is_p2p.

    bytes is in_nelems times the size of an element, the convention of PARAM and of Kineto's own bandwidths.

    Args:
        comms: The rows.
        stats: Receives what was repaired and what is unknown.
        collective: The collective of each row, if it has been parsed.
    """
    sizes = _map_distinct(comms, "dtype", categories.itemsize, pl.Int64)
    if collective is None:
        collective = categories.parse_collectives(comms["collective"])
    ranks, repaired = _parse_rank_lists(comms)
    if repaired:
        stats.append(
            Stat("read.completed_ranks", "info", repaired, "rank lists elided by the recorder, completed")
        )
    unknown = comms.filter(collective.is_null() & comms["collective"].is_not_null())
    if unknown.height:
        example = unknown["collective"].cast(pl.String)[0]
        stats.append(Stat("read.unknown_collective", "info", unknown.height, example))
    named = collective.cast(pl.String)
    return comms.with_columns(
        pl.when(collective.is_null())
        .then(pl.col("collective").cast(pl.String))
        .otherwise(named)
        .alias("collective"),
        ranks.alias("ranks"),
        (pl.col("in_nelems") * sizes).alias("bytes"),
        named.is_in(P2P).alias("is_p2p"),
    )


def convert_event_comms(comms: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Build the comms table of a profiler trace from the parser's raw columns."""
    if comms.is_empty():
        return _convert_no_comms(tuple(comms.schema.items())).clone()
    return _convert_event_comms(comms, stats)


@cache
def _convert_no_comms(schema: tuple[tuple[str, pl.DataType], ...]) -> pl.DataFrame:
    """Return the empty comms table of a trace without communication, from its raw columns' schema; cached."""
    return _convert_event_comms(pl.DataFrame(schema=dict(schema)), [])


def _convert_event_comms(comms: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    collective = categories.parse_collectives(comms["collective"])
    # Kineto's Src Rank, which the parser calls root, is the sender in a receive.
    receives = (collective.cast(pl.String) == "recv").fill_null(False)
    comms = comms.with_columns(
        pl.col("is_async").cast(pl.Boolean),
        pl.when(receives).then(pl.coalesce("peer", "root")).otherwise("peer").alias("peer"),
        pl.when(~receives).then("root").alias("root"),
    )
    return normalize_comms(comms, stats, collective)


def build_groups(config: Any) -> pl.DataFrame:
    """Build the groups table from a list of {pg_name, pg_desc, backend_config, ranks, group_size | pg_size}.

    An empty rank list means all ranks, as PyTorch writes it. Anything else than such a list yields no groups.
    """
    rows = []
    for group in config if isinstance(config, list) else []:
        if not isinstance(group, dict) or "pg_name" not in group:
            continue
        size = group.get("group_size", group.get("pg_size"))
        size = size if isinstance(size, int) and 0 <= size < 1 << 63 else None
        ranks = group.get("ranks")
        if isinstance(ranks, str):
            ranks = parse_rank_list(ranks, size)
        if ranks == [] and size is not None and size <= _MAX_GROUP_SIZE:
            ranks = list(range(size))
        if not isinstance(ranks, list):
            ranks = None
        rows.append(
            {
                "pg_name": str(group["pg_name"]),
                "pg_desc": _text(group.get("pg_desc")),
                "backend": _text(group.get("backend_config")),
                "ranks": None if ranks is None else json.dumps(ranks),
                "size": len(ranks) if size is None and ranks is not None else size,
            }
        )
    names = ("pg_name", "pg_desc", "backend", "ranks")
    return pl.DataFrame(rows, schema={**dict.fromkeys(names, pl.String), "size": pl.Int64}).unique(
        "pg_name", keep="last", maintain_order=True
    )


def parse_rank_list(text: str, size: int | None) -> list[int] | None:
    """Parse the text of a rank list, possibly abbreviated: ``[0, 1, ..., 31]``; None if it is invalid or ambiguous.

    An elided list is completed if the ranks before the dots have a constant step that leads to the last rank, and the
    length agrees with the group's size, if that is known; otherwise the result is None.
    """
    parts = [
        part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",") if part.strip()
    ]
    if not all(re.fullmatch(r"-?\d{1,18}|\.\.\.", part) for part in parts) or parts.count("...") > 1:
        return None
    if "..." not in parts:
        return [int(part) for part in parts]
    dots = parts.index("...")
    head, tail = [int(part) for part in parts[:dots]], [int(part) for part in parts[dots + 1 :]]
    if len(head) < 2 or not tail:
        return None
    step = head[1] - head[0]
    if step < 1 or (tail[-1] - head[0]) // step > _MAX_GROUP_SIZE:
        return None
    ranks = list(range(head[0], tail[-1] + 1, step))
    agrees = ranks[: len(head)] == head and ranks[-len(tail) :] == tail and size in (None, len(ranks))
    return ranks if agrees else None


def _parse_rank_lists(comms: pl.DataFrame) -> tuple[pl.Series, int]:
    parsed: dict[tuple[str | None, int | None], str | None] = {}
    elided = 0
    out: list[str | None] = []
    for text, size in comms.select(pl.col("ranks").cast(pl.String), "group_size").iter_rows():
        key = (text, size)
        if key not in parsed:
            ranks = None if text is None else parse_rank_list(text, size)
            parsed[key] = None if not ranks else json.dumps(ranks)
        elided += text is not None and "..." in text
        out.append(parsed[key])
    return pl.Series("ranks", out, pl.String), elided


def _map_distinct(frame: pl.DataFrame, column: str, function: Any, dtype: Any) -> pl.Series:
    """Apply a function to a text column, once per distinct text."""
    texts = frame[column].unique().drop_nulls().cast(pl.String)
    return (
        frame[column]
        .cast(pl.String)
        .replace_strict(
            texts,
            pl.Series([function(text) for text in texts], dtype=dtype),
            default=None,
            return_dtype=dtype,
        )
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
