"""Divergences between the ranks of a group: calls that are missing, differ or are unfinished, one row each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from etloom.analyses.hangs.job_calls import JobCalls
from etloom.analyses.helpers import conform_columns
from etloom.core.parallel_axes import parse_axis
from etloom.core.text import format_ranks

COLUMNS: dict[str, Any] = {
    "group": pl.String,
    "axis": pl.String,
    "seq": pl.Int64,
    "finding": pl.String,
    "collective": pl.String,
    "ranks": pl.List(pl.Int64),
    "others": pl.List(pl.Int64),
    "detail": pl.String,
    "called_ns": pl.Int64,
    "called_at": pl.String,
}
_UNEVEN_COLLECTIVES = frozenset({"all_to_all", "gather", "scatter", "send", "recv"})
_SEVERITY_ORDER = ("collective mismatch", "size mismatch", "dtype mismatch", "missing", "not finished")
_COMPARED = ("collective", "dtype", "in_nelems", "out_nelems")


def compare_calls(calls: JobCalls) -> pl.DataFrame:
    """Return the calls on which ranks of a group diverge (`COLUMNS`), by group and sequence number."""
    collectives = calls.table.filter(~pl.col("is_p2p"))
    oldest = dict(calls.table.group_by("rank").agg(pl.col("created_ns").min()).iter_rows())
    rows = [
        {"group": group, **finding}
        for (group,), table in collectives.group_by("group", maintain_order=True)
        for finding in _compare_group(
            table, calls.members.get(group) or sorted(calls.dumped), calls.dumped, oldest
        )
    ]
    rows += compare_messages(calls)
    axes = {group: parse_axis(group) for group in {row["group"] for row in rows}}
    complete = [dict.fromkeys(COLUMNS) | row | {"axis": axes[row["group"]]} for row in rows]
    table = pl.DataFrame(complete, schema=COLUMNS, orient="row")
    severity = pl.col("finding").replace_strict({name: at for at, name in enumerate(_SEVERITY_ORDER)})
    first = pl.col("seq").fill_null(-1)
    return conform_columns(table.sort(first.min().over("group"), "group", first, severity), COLUMNS)


def _compare_group(
    table: pl.DataFrame,
    members: tuple[int, ...] | list[int],
    dumped: frozenset[int],
    oldest: Mapping[int, int | None],
) -> Iterator[dict[str, Any]]:
    if absent := [rank for rank in members if rank not in dumped]:
        detail = "no dump of these ranks: a crash, or another file name"
        others = table.filter(_is_unfinished())["rank"].unique().to_list()
        yield {
            "seq": None,
            "finding": "missing",
            "ranks": sorted(absent),
            "others": sorted(others),
            "detail": detail,
        }
    present = [rank for rank in members if rank in dumped]
    first_seq = dict(table.group_by("rank").agg(pl.col("seq").min()).iter_rows())
    # A dump is a ring buffer: a record that may have been overwritten is not missing.
    reach_start = max(first_seq.values())
    for (seq,), rows in _select_suspicious(table, len(present)).group_by("seq", maintain_order=True):
        calls: Calls = {row["rank"]: row for row in rows.iter_rows(named=True)}
        called_ns = max((row["created_ns"] or 0 for row in calls.values()), default=0)
        reach = [
            rank
            for rank in present
            if first_seq.get(rank, reach_start) <= seq
            # A dump without any call of the group reaches as far back as its oldest call of other groups.
            and (rank in first_seq or (oldest.get(rank) or 0) <= called_ns)
        ]
        for finding in _compare_records(calls, reach):
            overwritten = sorted(set(present) - set(reach))
            if overwritten:
                finding["detail"] += f"; the dump of {format_ranks(overwritten)} no longer reaches back to it"
            yield {"seq": seq, **finding}


def _is_unfinished() -> pl.Expr:
    return pl.col("state").is_not_null() & (pl.col("state") != "completed")


def _select_suspicious(table: pl.DataFrame, member_count: int) -> pl.DataFrame:
    """Return the calls that, by sequence number, some members did not call, did not finish, or called with other
    arguments."""
    is_alike = [(pl.col(name).n_unique() == 1).alias(name) for name in _COMPARED]
    numbers = table.group_by("seq").agg(
        *is_alike, callers=pl.col("rank").n_unique(), unfinished=_is_unfinished().any()
    )
    is_plain = pl.all_horizontal(*_COMPARED, pl.col("callers") >= member_count, ~pl.col("unfinished"))
    suspicious = numbers.filter(~is_plain)["seq"]
    return table.filter(pl.col("seq").is_in(suspicious.implode()))


def _compare_records(calls: Calls, members: list[int]) -> Iterator[dict[str, Any]]:
    missing = [rank for rank in members if rank not in calls]
    waiting = [rank for rank, row in calls.items() if is_unfinished(row)]
    has_states = any(row["state"] is not None for row in calls.values())
    # A collective that is finished on its callers did not wait: the other dump is merely older.
    if missing and (waiting or not has_states):
        collective = next(iter(calls.values()))["collective"]
        finding = make_finding(
            "missing", missing, calls, collective, f"{collective} was called only by the other ranks"
        )
        yield finding | ({"others": sorted(waiting)} if waiting else {})
    yield from find_differences(calls, "collective mismatch", lambda row: row["collective"])
    # Different collectives have different sizes: compare those of the most common one.
    most_common = Counter(row["collective"] for row in calls.values()).most_common(1)[0][0]
    comparable = {rank: row for rank, row in calls.items() if row["collective"] == most_common}
    yield from find_differences(comparable, "dtype mismatch", lambda row: row["dtype"])
    if most_common not in _UNEVEN_COLLECTIVES:
        yield from find_differences(
            comparable, "size mismatch", lambda row: (row["in_nelems"], row["out_nelems"])
        )
    if waiting:
        yield make_unfinished(calls)


# Compare the unfinished point-to-point messages of each pair of ranks: sends with receives, in order.


def compare_messages(calls: JobCalls) -> list[dict[str, Any]]:
    """Return rows of the table of hangs for the unfinished point-to-point messages between ranks of the job."""
    pairs: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    messages = calls.table.filter("is_p2p").sort("rank", "seq", maintain_order=True)
    for row in messages.iter_rows(named=True):
        if is_unfinished(row) and (ends := _find_ends(row, calls.members.get(row["group"], ()))):
            pairs.setdefault((row["group"], *ends), []).append(row)
    return [
        {"group": group, **finding}
        for (group, source, destination), rows in pairs.items()
        for finding in _compare_pair(source, destination, rows, calls.dumped)
    ]


def _find_ends(row: dict[str, Any], members: tuple[int, ...]) -> tuple[int, int] | None:
    """Return source and destination rank of a message, whose peer a dump records as an index in the group; None if
    unknown."""
    rank, peer = row["rank"], row["peer"]
    if peer is None or row["collective"] not in ("send", "recv") or (members and not peer < len(members)):
        return None
    other = members[peer] if members else peer
    return (rank, other) if row["collective"] == "send" else (other, rank)


def _compare_pair(
    source: int, destination: int, rows: list[dict[str, Any]], dumped: frozenset[int]
) -> Iterator[dict[str, Any]]:
    """Yield rows of the table of hangs for the unfinished point-to-point messages from ``source`` to
    ``destination``."""
    sent, received = ([row for row in rows if row["collective"] == name] for name in ("send", "recv"))
    for first, second in zip(sent, received, strict=False):
        both = {source: first, destination: second}
        for column, finding in (("dtype", "dtype mismatch"), ("in_nelems", "size mismatch")):
            for finding_row in find_differences(both, finding, lambda row, column=column: row[column]):
                yield {"seq": second["seq"], **finding_row, "collective": "message"}
        yield {"seq": second["seq"], **make_unfinished(both), "collective": "message"}
    longer, ranks, name = (
        (sent, [destination], "recv") if len(sent) > len(received) else (received, [source], "send")
    )
    waiting = longer[min(len(sent), len(received)) :]
    if waiting:
        rank = source if name == "recv" else destination
        number = f"{len(waiting)} messages" if len(waiting) > 1 else "a message"
        is_dumped = set(ranks) <= dumped
        missing = "" if is_dumped else ", which has no dump: a crash, or another file name"
        yield {
            "seq": waiting[0]["seq"] if is_dumped else None,
            "finding": "missing",
            "collective": name,
            "ranks": ranks,
            "others": [rank],
            "detail": f"rank {rank} waits for {number} {'to' if name == 'recv' else 'from'} rank {ranks[0]}{missing}",
            "called_ns": waiting[0]["created_ns"],
            "called_at": waiting[0]["called_at"],
        }


# Make rows of the table of hangs: for unfinished calls, and for calls that differ between ranks.

Calls = dict[int, dict[str, Any]]
"""Calls of one sequence number, by rank."""


def is_unfinished(row: dict[str, Any]) -> bool:
    """Return whether the backend reports a call as unfinished."""
    return row["state"] not in ("completed", None)


def make_unfinished(calls: Calls) -> dict[str, Any]:
    """Return the row of a call that some ranks have not completed."""
    states: dict[str, list[int]] = {}
    for rank, row in calls.items():
        if is_unfinished(row):
            states.setdefault(row["state"], []).append(rank)
    waiting = [rank for ranks in states.values() for rank in ranks]
    detail = "; ".join(f"{format_ranks(ranks)}: {state}" for state, ranks in states.items())
    return make_finding("not finished", waiting, calls, calls[waiting[0]]["collective"], detail)


def find_differences(calls: Calls, finding: str, get_value: Any) -> Iterator[dict[str, Any]]:
    """Yield a row for the ranks on which an attribute of a call differs from the most common value, if any.

    If two values are equally common, the finding names all ranks: neither side is known to be wrong.
    """
    by_value: dict[Any, list[int]] = {}
    for rank, row in calls.items():
        by_value.setdefault(get_value(row), []).append(rank)
    if len(by_value) < 2:
        return
    counts = Counter({value: len(ranks) for value, ranks in by_value.items()}).most_common(2)
    has_majority = counts[0][1] > counts[1][1]
    deviating = sorted(
        rank
        for value, ranks in by_value.items()
        if not has_majority or value != counts[0][0]
        for rank in ranks
    )
    detail = "; ".join(
        f"{_format_value(value)} on {format_ranks(ranks)}" for value, ranks in by_value.items()
    )
    yield make_finding(finding, deviating, calls, calls[deviating[0]]["collective"], detail)


def make_finding(
    finding: str, ranks: list[int], calls: Calls, collective: str | None, detail: str
) -> dict[str, Any]:
    """Return a row of the table of hangs (`COLUMNS`) without group and seq."""
    others = sorted(set(calls) - set(ranks))
    callers = [rank for rank in ranks if rank in calls] or others
    return {
        "finding": finding,
        "collective": collective,
        "ranks": sorted(ranks),
        "others": others,
        "detail": detail,
        "called_ns": min(row["created_ns"] for row in calls.values()),
        "called_at": calls[callers[0]]["called_at"],
    }


def _format_value(value: Any) -> str:
    return f"{value[0]} in, {value[1]} out" if isinstance(value, tuple) else str(value)
