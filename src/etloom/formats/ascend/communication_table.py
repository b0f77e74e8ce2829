"""Reads the times of collectives in communication.json (of a rank) and cluster_communication.json (of all ranks).

The first has steps, kinds, and operators; the second, by msprof-analyze, groups of ranks, steps, operators and ranks.
Each operator has the time of its start, its elapsed, transit and wait time, and what each link carried, which are in
``events.args``. Sizes of messages are not stated; sums of several operators ("Total Op Info") are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats.ascend.database import COLLECTIVE_PID
from etloom.formats.io.compression import read_content
from etloom.formats.io.json_text import load_json
from etloom.formats.kineto.ascend import COLLECTIVES, categorize
from etloom.formats.tables.building import build_trace, sort_events
from etloom.formats.tables.meta_checks import is_rank

_MAX_BYTES = 1 << 30
_TIMES, _LINKS, _SUM = "Communication Time Info", "Communication Bandwidth Info", "Total Op Info"
_START, _ELAPSED = "Start Timestamp(us)", "Elapse Time(ms)"
_MAX_DEPTH = 8
_STEP = re.compile(r"step(\d{1,9})$")
_LATEST = 1 << 61


def sniff(head: bytes) -> bool:
    """Return whether a file has the times of collectives, judging from its first bytes ``head``."""
    return head.lstrip()[:1] == b"{" and f'"{_TIMES}"'.encode() in head


def read(path: Path) -> Trace | Job:
    """Read the collectives of one rank, or of all ranks as a Job.

    Raises:
        ReadError: The file is not complete JSON, or has no operator with a time.
        LimitError: It is too large.
    """
    content, _ = read_content(path, _MAX_BYTES)
    try:
        document = load_json(content)
    except (ValueError, RecursionError):
        raise ReadError("is not complete JSON", where=path, remedy="copy or export it again") from None
    by_rank: dict[int | None, list[dict[str, Any]]] = {}
    lost = 0
    for keys, operator in _walk(document, ()):
        rank, row = _build_row(keys, operator)
        lost += row is None
        if row is not None:
            by_rank.setdefault(rank, []).append(row)
    stats = [Stat("read.no_time", "data_loss", lost, "collectives without a valid start")]
    if not by_rank:
        raise ReadError(
            "has no collective with a time", where=path, remedy="record with profiler_level=Level1 or higher"
        )
    ranks: list[int | None] = [*sorted(rank for rank in by_rank if rank is not None)] or [None]
    dropped = len(by_rank.get(None, [])) if None not in ranks else 0
    stats.append(Stat("read.no_rank", "data_loss", dropped, "collectives without the number of a rank"))
    meta = {"formats": ["ascend"], "files": [str(path)], "clock": "epoch", "base_ns": 0}
    traces = {
        rank: _build_trace(by_rank[rank], {**meta, "rank": rank}, [] if place else stats)
        for place, rank in enumerate(ranks)
    }
    if len(traces) == 1:
        return next(iter(traces.values()))
    return Job({rank: trace for rank, trace in traces.items() if rank is not None}, meta)


def _walk(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the keys that lead to each operator, and the operator."""
    if not isinstance(value, dict) or len(keys) > _MAX_DEPTH or (keys and keys[-1].startswith(_SUM)):
        return
    if isinstance(value.get(_TIMES), dict):
        yield keys, value
        return
    for key, child in value.items():
        yield from _walk(child, (*keys, key))


def _build_row(keys: tuple[str, ...], operator: dict[str, Any]) -> tuple[int | None, dict[str, Any] | None]:
    """Return the rank among the keys of an operator, and its event; None without a valid start."""
    last = keys[-1] if keys else ""
    rank = int(last) if last.isdecimal() and len(last) <= 10 and is_rank(int(last)) else None
    name = next((key for key in reversed(keys) if not key.isdecimal()), "")
    step = next((int(match[1]) for key in keys if (match := _STEP.match(key))), None)
    times = operator[_TIMES]
    start, elapsed = (times.get(key) for key in (_START, _ELAPSED))
    if not all(type(value) in (int, float) for value in (start, elapsed)) or not 0 < start * 1000 < _LATEST:
        return rank, None
    links = operator.get(_LINKS)
    facts = {"step": step, **times, **({"links": links} if isinstance(links, dict) else {})}
    duration = round(elapsed * 1e6) if 0 <= elapsed < 1e9 else None
    return rank, {
        "name": name.partition("@")[0],
        "group": name.partition("@")[2],
        # Not start * 1000, which has no digits left for ns.
        "ts": int(start) * 1000 + round(start % 1 * 1000),
        "dur": duration,
        "args": json.dumps(facts),
    }


def _build_trace(rows: list[dict[str, Any]], meta: dict[str, Any], stats: list[Stat]) -> Trace:
    schema = {"name": pl.String, "group": pl.String, "ts": pl.Int64, "dur": pl.Int64, "args": pl.String}
    table = pl.DataFrame(rows, schema=schema).with_row_index("position")
    groups = {name: number for number, name in enumerate(table["group"].unique().sort())}
    events = sort_events(
        table.with_columns(
            ph=pl.lit("X"),
            pid=pl.lit(COLLECTIVE_PID, dtype=pl.Int64),
            tid=pl.col("group").replace_strict(list(groups), list(groups.values()), return_dtype=pl.Int64),
        )
    ).with_row_index("id")
    threads = pl.DataFrame(
        {"pid": [COLLECTIVE_PID], "tid": [None], "name": [COLLECTIVES], "labels": [None]},
        schema={"pid": pl.Int64, "tid": pl.Int64, "name": pl.String, "labels": pl.String},
    )
    return categorize(build_trace({"events": events.drop("group"), "threads": threads}, meta, stats))
