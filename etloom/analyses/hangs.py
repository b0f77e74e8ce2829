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
EMPTY_MESSAGE = "all ranks called the same collectives in the dumps, and all are finished"
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
_TORCH_FRAME = re.compile(r"[/\\]torch[/\\]")
_UNEVEN_COLLECTIVES = frozenset({"all_to_all", "gather", "scatter", "send", "recv"})
_SEVERITY_ORDER = ("collective mismatch", "size mismatch", "dtype mismatch", "missing", "not finished")
_Records = dict[int, dict[str, Any]]  # records of one sequence number, by rank


def analyze(job: Job) -> pl.DataFrame:
    dumps = {rank: trace for rank, trace in job.items() if "flight_recorder" in trace.meta.get("formats", ())}
    if not dumps:
        raise AnalysisError(
            "the run contains no Flight Recorder dump",
            remedy="set TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT, and open the folder with the "
            "dumps",
        )
    records = pl.concat([_select_records(rank, trace) for rank, trace in dumps.items()])
    rows = [
        {"group": group, **finding}
        for (group,), group_rows in records.group_by("group", maintain_order=True)
        for finding in _compare_group(group_rows, _find_members(group_rows) or sorted(dumps), set(dumps))
    ]
    messages = pl.concat([_select_messages(rank, trace) for rank, trace in dumps.items()])
    rows += [
        {"group": group, **finding}
        for (group, *_), group_rows in messages.group_by(
            "group", "source", "destination", maintain_order=True
        )
        for finding in _compare_pair(group_rows, set(dumps))
    ]
    table = pl.DataFrame(rows, schema=COLUMNS, orient="row")
    severity = pl.col("finding").replace_strict({name: at for at, name in enumerate(_SEVERITY_ORDER)})
    first = pl.col("seq").fill_null(-1)
    return conform_columns(table.sort(first.min().over("group"), "group", first, severity), COLUMNS)


def _select_records(rank: int, trace: Trace, messages: bool = False) -> pl.DataFrame:
    """Return the numbered collectives of a dump, or its messages."""
    text = ("collective", "pg_name", "pg_desc", "ranks", "dtype")
    selected = pl.col("seq").is_not_null() & (pl.col("is_p2p").fill_null(False) == messages)
    comms = trace.comms.filter(selected).select(
        *(pl.col(name).cast(pl.String) for name in text), "seq", "in_nelems", "out_nelems", "event", "peer"
    )
    args = trace.events.select(
        "id", args=pl.col("args").cast(pl.String), called=pl.col("name").cast(pl.String)
    )
    named = pl.concat_str("pg_name", pl.lit(" "), pl.col("pg_desc").fill_null("")).str.strip_chars()
    return comms.join(args, left_on="event", right_on="id", how="left").with_columns(
        pl.lit(rank).alias("rank"), group=pl.coalesce(named, pl.lit("?"))
    )


def _select_messages(rank: int, trace: Trace) -> pl.DataFrame:
    """Return the unfinished messages between ranks of the job, in order."""
    records = _select_records(rank, trace, messages=True)
    rows = [
        {"group": row["group"], "source": ends[0], "destination": ends[1], "record": row}
        for row in records.sort("seq", "event").iter_rows(named=True)
        if _is_unfinished(row) and (ends := _find_ends(row, rank))
    ]
    schema = {"group": pl.String, "source": pl.Int64, "destination": pl.Int64, "record": pl.Object}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _find_ends(row: dict[str, Any], rank: int) -> tuple[int, int] | None:
    """Return source and destination of a message. A dump identifies them by their index in the group."""
    members, peer = json.loads(row["ranks"] or "[]"), row["peer"]
    if peer is None or row["collective"] not in ("send", "recv") or (members and not peer < len(members)):
        return None
    other = members[peer] if members else peer
    return (rank, other) if row["collective"] == "send" else (other, rank)


def _compare_pair(messages: pl.DataFrame, dumped: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the findings of unfinished messages from one rank to another."""
    source, destination = messages.select("source", "destination").row(0)
    records: list[dict[str, Any]] = messages["record"].to_list()
    sent, received = ([row for row in records if row["collective"] == name] for name in ("send", "recv"))
    for first, second in zip(sent, received, strict=False):
        both = {source: first, destination: second}
        for column, finding in (("dtype", "dtype mismatch"), ("in_nelems", "size mismatch")):
            for finding_row in _find_differences(both, finding, lambda row, column=column: row[column]):
                yield {"seq": second["seq"], **finding_row, "collective": "message"}
        yield {"seq": second["seq"], **_make_unfinished(both), "collective": "message"}
    longer, ranks, name = (
        (sent, [destination], "recv") if len(sent) > len(received) else (received, [source], "send")
    )
    waiting = longer[min(len(sent), len(received)) :]
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
            "called_at": _find_call_site(waiting[0]),
        }


def _find_members(records: pl.DataFrame) -> list[int]:
    recorded = records["ranks"].drop_nulls()
    return sorted(json.loads(recorded[0])) if len(recorded) else []


def _compare_group(
    group_records: pl.DataFrame, members: list[int], dumped: set[int]
) -> Iterator[dict[str, Any]]:
    if missing := [rank for rank in members if rank not in dumped]:
        detail = "no dump of these ranks: a crash, or another file name"
        yield {
            "seq": None,
            "finding": "missing",
            "ranks": missing,
            "others": sorted(dumped),
            "detail": detail,
        }
    present = [rank for rank in members if rank in dumped]
    first_seq = dict(group_records.group_by("rank").agg(pl.col("seq").min()).iter_rows())
    # A dump is a ring buffer: a record that may have been overwritten is not missing.
    reach_start = max(first_seq.values())
    for (seq,), rows in group_records.group_by("seq", maintain_order=True):
        records: _Records = {row["rank"]: row for row in rows.iter_rows(named=True)}
        reach = [rank for rank in present if first_seq.get(rank, reach_start) <= seq]
        for finding in _compare_records(records, reach):
            overwritten = sorted(set(present) - set(reach))
            if overwritten:
                finding["detail"] += f"; the dump of {format_ranks(overwritten)} no longer reaches back to it"
            yield {"seq": seq, **finding}


def _compare_records(records: _Records, members: list[int]) -> Iterator[dict[str, Any]]:
    if missing := [rank for rank in members if rank not in records]:
        collective = next(iter(records.values()))["collective"]
        yield _make_finding(
            "missing", missing, records, collective, f"{collective} was called by the others only"
        )
    yield from _find_differences(records, "collective mismatch", lambda row: row["collective"])
    # Different collectives have different sizes: compare those of the most common one.
    most_common = Counter(row["collective"] for row in records.values()).most_common(1)[0][0]
    comparable = {rank: row for rank, row in records.items() if row["collective"] == most_common}
    yield from _find_differences(comparable, "dtype mismatch", lambda row: row["dtype"])
    if most_common not in _UNEVEN_COLLECTIVES:
        yield from _find_differences(
            comparable, "size mismatch", lambda row: (row["in_nelems"], row["out_nelems"])
        )
    if any(map(_is_unfinished, records.values())):
        yield _make_unfinished(records)


def _is_unfinished(row: dict[str, Any]) -> bool:
    """Return whether a record is unfinished."""
    args = _parse_args(row)
    retired = (row["called"] or "").startswith("gloo:") and args.get("retired")
    return not retired and args.get("state") not in ("completed", None)


def _make_unfinished(records: _Records) -> dict[str, Any]:
    waiting = [rank for rank, row in records.items() if _is_unfinished(row)]
    detail = ", ".join(f"rank {rank}: {_parse_args(records[rank]).get('state')}" for rank in waiting)
    return _make_finding("not finished", waiting, records, records[waiting[0]]["collective"], detail)


def _find_differences(records: _Records, finding: str, get_value: Any) -> Iterator[dict[str, Any]]:
    """Yield a finding for the ranks whose value differs from the most common one, if any."""
    by_value: dict[Any, list[int]] = {}
    for rank, row in records.items():
        by_value.setdefault(get_value(row), []).append(rank)
    if len(by_value) < 2:
        return
    most_common = max(by_value, key=lambda value: len(by_value[value]))
    deviating = sorted(rank for value, ranks in by_value.items() if value != most_common for rank in ranks)
    detail = "; ".join(
        f"{_format_value(value)} on {format_ranks(ranks)}" for value, ranks in by_value.items()
    )
    yield _make_finding(finding, deviating, records, records[deviating[0]]["collective"], detail)


def _format_value(value: Any) -> str:
    return f"{value[0]} in, {value[1]} out" if isinstance(value, tuple) else str(value)


def _make_finding(
    finding: str, ranks: list[int], records: _Records, collective: str | None, detail: str
) -> dict[str, Any]:
    others = sorted(set(records) - set(ranks))
    callers = [rank for rank in ranks if rank in records] or others
    return {
        "finding": finding,
        "collective": collective,
        "ranks": sorted(ranks),
        "others": others,
        "detail": detail,
        "called_at": _find_call_site(records[callers[0]]),
    }


def _find_call_site(row: dict[str, Any]) -> str | None:
    frames: list[str] = _parse_args(row).get("frames") or []
    return next((frame for frame in frames if not _TORCH_FRAME.search(frame)), frames[0] if frames else None)


def _parse_args(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(row["args"]) if row["args"] else {}
