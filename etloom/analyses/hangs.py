"""Causes of a hang, from Flight Recorder dumps: the first collective where the ranks of a group diverge.

The records of each group are compared by sequence number, each among the dumps that still contain it: a dump is a ring
buffer, in which old calls are overwritten. One row per finding, most severe first; in each group look at the first
divergence, later ones are consequences.

- missing: these ranks never called it, others did. Also ranks of the group without a dump.
- collective mismatch: ranks called different collectives with the same number.
- size mismatch, dtype mismatch: the same collective with different sizes or types. Sizes of an all-to-all, and of the
  root of a gather or scatter, may differ and are not compared.
- not finished: these ranks called it and have not completed it (state: scheduled, started). gloo records no state; its
  collectives are finished once their work is retired.

Of point-to-point messages (send, recv) the unfinished ones are compared per pair of ranks, in order: missing is the
side that has not called it; seq is the recorder's message number on the side that waits.

others: the ranks for which the finding holds the other way around. called_at: the innermost frame outside of torch
where the listed ranks called it, else where the others did.

Definition: the matching of torch.distributed.flight_recorder.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import polars as pl

from etloom.analyses.helpers import conform_columns
from etloom.core.errors import AnalysisError
from etloom.core.text import format_ranks
from etloom.core.trace import Job, Trace

SCOPE = "job"
NOTHING = "what the dumps hold was called alike by all ranks, and is finished"
COLUMNS: dict[str, Any] = {
    "group": pl.String,
    "seq": pl.Int64,
    "finding": pl.String,
    "collective": pl.String,
    "ranks": pl.List(pl.Int64),
    "others": pl.List(pl.Int64),
    "detail": pl.String,
    "called_at": pl.String,
}
_TORCH = re.compile(r"[/\\]torch[/\\]")
_UNEVEN = frozenset({"all_to_all", "gather", "scatter", "send", "recv"})
_ORDER = ("collective mismatch", "size mismatch", "dtype mismatch", "missing", "not finished")
_Records = dict[int, dict[str, Any]]  # of one number, by rank


def analyze(job: Job) -> pl.DataFrame:
    dumps = {rank: trace for rank, trace in job.items() if "flight_recorder" in trace.meta.get("formats", ())}
    if not dumps:
        raise AnalysisError(
            "the run holds no Flight Recorder dump",
            remedy="set TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT, and open the folder of the dumps",
        )
    records = pl.concat([_records(rank, trace) for rank, trace in dumps.items()])
    rows = [
        {"group": group, **finding}
        for (group,), own in records.group_by("group", maintain_order=True)
        for finding in _of_group(own, _members(own) or sorted(dumps), set(dumps))
    ]
    messages = pl.concat([_messages(rank, trace) for rank, trace in dumps.items()])
    rows += [
        {"group": group, **finding}
        for (group, *_), own in messages.group_by("group", "source", "destination", maintain_order=True)
        for finding in _of_pair(own, set(dumps))
    ]
    table = pl.DataFrame(rows, schema=COLUMNS, orient="row")
    worst = pl.col("finding").replace_strict({name: at for at, name in enumerate(_ORDER)})
    first = pl.col("seq").fill_null(-1)
    return conform_columns(table.sort(first.min().over("group"), "group", first, worst), COLUMNS)


def _records(rank: int, trace: Trace, messages: bool = False) -> pl.DataFrame:
    """The numbered collectives of a dump, or its messages."""
    text = ("collective", "pg_name", "pg_desc", "ranks", "dtype")
    chosen = pl.col("seq").is_not_null() & (pl.col("is_p2p").fill_null(False) == messages)
    comms = trace.comms.filter(chosen).select(
        *(pl.col(name).cast(pl.String) for name in text), "seq", "in_nelems", "out_nelems", "event", "peer"
    )
    args = trace.events.select(
        "id", args=pl.col("args").cast(pl.String), called=pl.col("name").cast(pl.String)
    )
    named = pl.concat_str("pg_name", pl.lit(" "), pl.col("pg_desc").fill_null("")).str.strip_chars()
    return comms.join(args, left_on="event", right_on="id", how="left").with_columns(
        pl.lit(rank).alias("rank"), group=pl.coalesce(named, pl.lit("?"))
    )


def _messages(rank: int, trace: Trace) -> pl.DataFrame:
    """The messages of a dump that are not finished, in order, between ranks of the job."""
    records = _records(rank, trace, messages=True)
    rows = [
        {"group": row["group"], "source": ends[0], "destination": ends[1], "record": row}
        for row in records.sort("seq", "event").iter_rows(named=True)
        if _waits(row) and (ends := _ends(row, rank))
    ]
    schema = {"group": pl.String, "source": pl.Int64, "destination": pl.Int64, "record": pl.Object}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _ends(row: dict[str, Any], rank: int) -> tuple[int, int] | None:
    """From which rank to which. A dump names them by their place in the group."""
    members, peer = json.loads(row["ranks"] or "[]"), row["peer"]
    if peer is None or row["collective"] not in ("send", "recv") or (members and not peer < len(members)):
        return None
    other = members[peer] if members else peer
    return (rank, other) if row["collective"] == "send" else (other, rank)


def _of_pair(own: pl.DataFrame, dumped: set[int]) -> Iterator[dict[str, Any]]:
    """Of the unfinished messages from one rank to another."""
    source, destination = own.select("source", "destination").row(0)
    records: list[dict[str, Any]] = own["record"].to_list()
    sent, got = ([row for row in records if row["collective"] == name] for name in ("send", "recv"))
    for first, second in zip(sent, got, strict=False):
        both = {source: first, destination: second}
        for column, finding in (("dtype", "dtype mismatch"), ("in_nelems", "size mismatch")):
            for found in _differing(both, finding, lambda row, column=column: row[column]):
                yield {"seq": second["seq"], **found, "collective": "message"}
        yield {"seq": second["seq"], **_not_finished(both), "collective": "message"}
    more, ranks, name = (sent, [destination], "recv") if len(sent) > len(got) else (got, [source], "send")
    waiting = more[min(len(sent), len(got)) :]
    if waiting and set(ranks) <= dumped:
        rank = source if name == "recv" else destination
        number = f"{len(waiting)} messages" if len(waiting) > 1 else "a message"
        detail = f"rank {rank} waits for {number} {'to' if name == 'recv' else 'from'} rank {ranks[0]}"
        yield {
            "seq": waiting[0]["seq"],
            "finding": "missing",
            "collective": name,
            "ranks": ranks,
            "others": [rank],
            "detail": detail,
            "called_at": _called_at(waiting[0]),
        }


def _members(own: pl.DataFrame) -> list[int]:
    known = own["ranks"].drop_nulls()
    return sorted(json.loads(known[0])) if len(known) else []


def _of_group(own: pl.DataFrame, members: list[int], dumped: set[int]) -> Iterator[dict[str, Any]]:
    if absent := [rank for rank in members if rank not in dumped]:
        detail = "no dump of these ranks: a crash, or another file name"
        yield {"seq": None, "finding": "missing", "ranks": absent, "others": sorted(dumped), "detail": detail}
    present = [rank for rank in members if rank in dumped]
    held = dict(own.group_by("rank").agg(pl.col("seq").min()).iter_rows())
    # A dump is a ring: what a rank may have overwritten is not missing there.
    since = max(held.values())
    for (seq,), at in own.group_by("seq", maintain_order=True):
        records: _Records = {row["rank"]: row for row in at.iter_rows(named=True)}
        reach = [rank for rank in present if held.get(rank, since) <= seq]
        for finding in _of_number(records, reach):
            overwritten = sorted(set(present) - set(reach))
            if overwritten:
                finding["detail"] += f"; the dump of {format_ranks(overwritten)} no longer reaches back to it"
            yield {"seq": seq, **finding}


def _of_number(records: _Records, members: list[int]) -> Iterator[dict[str, Any]]:
    if missing := [rank for rank in members if rank not in records]:
        called = next(iter(records.values()))["collective"]
        yield _finding("missing", missing, records, called, f"{called} was called by the others only")
    yield from _differing(records, "collective mismatch", lambda row: row["collective"])
    # Different collectives have different sizes: those of the most common one are compared.
    usual = Counter(row["collective"] for row in records.values()).most_common(1)[0][0]
    alike = {rank: row for rank, row in records.items() if row["collective"] == usual}
    yield from _differing(alike, "dtype mismatch", lambda row: row["dtype"])
    if usual not in _UNEVEN:
        yield from _differing(alike, "size mismatch", lambda row: (row["in_nelems"], row["out_nelems"]))
    if any(map(_waits, records.values())):
        yield _not_finished(records)


def _waits(row: dict[str, Any]) -> bool:
    """Whether a record is not finished."""
    args = _args(row)
    untold = (row["called"] or "").startswith("gloo:") and args.get("retired")
    return not untold and args.get("state") not in ("completed", None)


def _not_finished(records: _Records) -> dict[str, Any]:
    waiting = [rank for rank, row in records.items() if _waits(row)]
    detail = ", ".join(f"rank {rank}: {_args(records[rank]).get('state')}" for rank in waiting)
    return _finding("not finished", waiting, records, records[waiting[0]]["collective"], detail)


def _differing(records: _Records, finding: str, of: Any) -> Iterator[dict[str, Any]]:
    """A finding where the value is not the same on all ranks, of those where it is not the most common one."""
    by_value: dict[Any, list[int]] = {}
    for rank, row in records.items():
        by_value.setdefault(of(row), []).append(rank)
    if len(by_value) < 2:
        return
    usual = max(by_value, key=lambda value: len(by_value[value]))
    odd = sorted(rank for value, ranks in by_value.items() if value != usual for rank in ranks)
    detail = "; ".join(f"{_words(value)} on {format_ranks(ranks)}" for value, ranks in by_value.items())
    yield _finding(finding, odd, records, records[odd[0]]["collective"], detail)


def _words(value: Any) -> str:
    return f"{value[0]} in, {value[1]} out" if isinstance(value, tuple) else str(value)


def _finding(
    finding: str, ranks: list[int], records: _Records, collective: str | None, detail: str
) -> dict[str, Any]:
    others = sorted(set(records) - set(ranks))
    asked = [rank for rank in ranks if rank in records] or others
    return {
        "finding": finding,
        "collective": collective,
        "ranks": sorted(ranks),
        "others": others,
        "detail": detail,
        "called_at": _called_at(records[asked[0]]),
    }


def _called_at(row: dict[str, Any]) -> str | None:
    frames: list[str] = _args(row).get("frames") or []
    return next((frame for frame in frames if not _TORCH.search(frame)), frames[0] if frames else None)


def _args(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(row["args"]) if row["args"] else {}
