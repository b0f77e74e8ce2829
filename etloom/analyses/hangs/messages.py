"""Compare the unfinished point-to-point messages of each pair of ranks: sends with receives, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from etloom.analyses.hangs.finding_rows import find_differences, is_unfinished, make_unfinished
from etloom.analyses.hangs.job_calls import JobCalls


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
