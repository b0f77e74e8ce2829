"""Parses the JSON form of a RAS report (NCCL 2.28.7 and later), also without the comma that 2.28.9 leaves out."""

from __future__ import annotations

import json
import re
from typing import Any

from etloom.core.communicators import (
    ASYNC_ERROR,
    DEAD,
    INIT_ERROR,
    NO_COMMUNICATOR,
    STATUS,
    UNRESPONSIVE,
    CommunicatorState,
    RankPlace,
    RasReport,
    group_ranks,
    sort_communicators,
)
from etloom.core.schema import Stat
from etloom.formats.io.json_text import load_json, replace_surrogates, to_natural

MAX_RANKS = 1 << 20
"""The largest accepted number of ranks of a communicator."""
_MAX_COLLECTIVES = 64
_MAX_NAME = 100
_MAX_HEAD = 1000
_MAX_FAILURES = 16
"""Damaged ranks of a truncated communicator after which the rest is not read."""
_SUCCESS, _IN_PROGRESS = 0, 7
_ERRORS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
}
"""Result code of NCCL -> its name in the text form."""
_MISSING_COMMA = re.compile(r'(?<=[\d"\]}el])(?=[ \t]*\r?\n\s*["{])')
"""Matches the place between a value and a member on the next line. A JSON string has no line breaks."""
_HASH = re.compile(r"0x[0-9a-fA-F]{1,16}")
_NEXT_OBJECT = re.compile(r"\s*,?\s*(?=\{)")
_RANK = re.compile(r'\{\s*"rank"\s*:')


def parse_json(text: str, stats: list[Stat]) -> RasReport | None:
    """Parse a report; None if it has no list of communicators. Damage is appended to ``stats``."""
    document, unread = _load(text, stats)
    listed = document.get("communicators") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        return None
    damaged = [0]
    states = [state for item in listed if (state := _build_state(item, damaged)) is not None]
    if unread and states:
        last = states[-1]
        rest = (last.size or 0) - sum(group.count for group in last.groups.get(STATUS, ()))
        states[-1] = CommunicatorState(
            last.name, last.size, last.groups, last.places, max(rest, 0), id=last.id
        )
    reason = "a communicator or rank without the required members"
    stats += [Stat("read.damaged_entry", "data_loss", damaged[0], reason)] if damaged[0] else []
    gpus = None if unread else _count_gpus(states)
    version, timestamp = (document.get(name) for name in ("nccl_version", "timestamp"))
    return RasReport(
        "json",
        sort_communicators(states),
        max(to_natural(document.get("communicators_count"), 1 << 31) or 0, len(states)),
        version if isinstance(version, str) else None,
        gpus,
        timestamp if isinstance(timestamp, str) else None,
        stats=tuple(stats),
        full_sizes=sum(state.size == gpus for state in states),
    )


def _count_gpus(states: list[CommunicatorState]) -> int | None:
    """Return the number of different places of ranks; None if the place of a rank is unknown."""
    places: set[RankPlace] = set()
    for state in states:
        if len(state.places) < sum(group.count for group in state.groups.get(STATUS, ())):
            return None
        places.update(state.places.values())
    return len(places) or None


def _load(text: str, stats: list[Stat]) -> tuple[Any, bool]:
    """Load a report, with commas added where they are missing; from a truncated one, what is complete.

    Returns:
        The document, and whether its last communicator is cut off.
    """
    try:
        return load_json(text), False
    except (ValueError, RecursionError) as error:
        failure = error
    repaired, commas = _MISSING_COMMA.subn(",", text)
    if commas:
        stats.append(Stat("read.missing_comma", "info", commas, 'no comma before "status" (NCCL 2.28.9)'))
    try:
        return load_json(repaired), False
    except (ValueError, RecursionError):
        document, is_cut = _recover(repaired)
    count = len(document["communicators"])
    stats.append(Stat("read.truncated", "data_loss", 1, f"{failure}: {count:,} communicators were read"))
    return replace_surrogates(document), is_cut


def _recover(text: str) -> tuple[dict[str, Any], bool]:
    """Return the head and the complete communicators of a damaged report, and the complete ranks of the next one."""
    decoder = json.JSONDecoder()
    document: dict[str, Any] = {"communicators": []}
    start = re.search(r'"communicators"\s*:\s*\[', text)
    if start is None:
        return document, False
    for name in ("nccl_version", "timestamp"):
        if match := re.search(rf'"{name}"\s*:\s*"([^"\n]*)"', text[: start.start()]):
            document[name] = match[1]
    at = start.end()
    while begin := _NEXT_OBJECT.match(text, at):
        try:
            value, at = decoder.raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            partial = _recover_communicator(text[begin.end() :], decoder)
            document["communicators"] += [partial] if partial else []
            return document, bool(partial)
        document["communicators"].append(value)
    return document, False


def _recover_communicator(text: str, decoder: json.JSONDecoder) -> dict[str, Any] | None:
    """Return a communicator that is cut off, with its complete ranks; None if its head is not complete."""
    head = re.match(r'\{\s*"hash"\s*:\s*"(0x\w+)".*?"size"\s*:\s*(\d{1,9})\s*,', text[:_MAX_HEAD], re.DOTALL)
    if head is None:
        return None
    lists: dict[str, list[Any]] = {"ranks": [], "missing_ranks": []}
    missing = text.find('"missing_ranks"')
    at, failures = head.end(), 0
    while failures < _MAX_FAILURES and (begin := _RANK.search(text, at)):
        try:
            value, end = decoder.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            at, failures = begin.end(), failures + 1
            continue
        lists["missing_ranks" if 0 <= missing < begin.start() else "ranks"].append(value)
        at = end
    return {"hash": head[1], "size": int(head[2]), **lists}


def _build_state(item: Any, damaged: list[int]) -> CommunicatorState | None:
    """Convert a communicator; None if it has no hash or size. Entries that are skipped are counted in ``damaged``."""
    name, size = (
        (item.get("hash"), to_natural(item.get("size"), MAX_RANKS + 1))
        if isinstance(item, dict)
        else (None, None)
    )
    if not isinstance(name, str) or not _HASH.fullmatch(name) or not size:
        damaged[0] += 1
        return None
    values: dict[str, dict[int, str | int]] = {STATUS: {}}
    places: dict[int, RankPlace] = {}
    for key, add in (("ranks", _add_rank), ("missing_ranks", _add_missing_rank)):
        entries = item.get(key)
        for entry in entries if isinstance(entries, list) else ():
            rank = to_natural(entry.get("rank"), size) if isinstance(entry, dict) else None
            status = entry.get("status") if isinstance(entry, dict) else None
            if rank is None or not isinstance(status, dict) or rank in values[STATUS]:
                damaged[0] += 1
                continue
            add(rank, entry, status, values)
            if (place := _read_place(entry)) is not None:
                places[rank] = place
    secondary = item.get("secondary_hash")
    groups = {key: group_ranks(by_rank) for key, by_rank in values.items() if by_rank}
    identity = f"{name}:{secondary}" if isinstance(secondary, str) else name
    return CommunicatorState(f"{int(name, 16):016x}", size, groups, places, id=identity)


def _add_rank(
    rank: int, entry: dict[str, Any], status: dict[str, Any], values: dict[str, dict[int, str | int]]
) -> None:
    """Add the status, the errors and the counts of a rank that answered to ``values``."""
    init, error = (to_natural(status.get(name), 1 << 31) for name in ("init_state", "async_error"))
    if status.get("abort_flag") is True:
        values[STATUS][rank] = "ABORT"
    elif status.get("finalize_called") is True or status.get("destroy_flag") is True:
        values[STATUS][rank] = "FINALIZE"
    else:
        values[STATUS][rank] = "RUNNING" if init == _SUCCESS else "INIT"
    for key, code in ((INIT_ERROR, init), (ASYNC_ERROR, error)):
        if code not in (None, _SUCCESS, _IN_PROGRESS):
            values.setdefault(key, {})[rank] = _ERRORS.get(code or 0, "Unexpected error")
    counts = entry.get("collective_counts")
    for name, value in list(counts.items())[:_MAX_COLLECTIVES] if isinstance(counts, dict) else ():
        count = to_natural(value)
        by_rank = values.get(name) if count is not None and len(name) <= _MAX_NAME else None
        if (
            by_rank is None
            and count is not None
            and len(name) <= _MAX_NAME
            and len(values) < _MAX_COLLECTIVES
        ):
            by_rank = values.setdefault(name, {})
        if by_rank is not None and count is not None and name not in (STATUS, INIT_ERROR, ASYNC_ERROR):
            by_rank[rank] = count


def _add_missing_rank(
    rank: int, entry: dict[str, Any], status: dict[str, Any], values: dict[str, dict[int, str | int]]
) -> None:
    """Add the status of a rank that did not answer for this communicator to ``values``."""
    if status.get("considered_dead") is True:
        values[STATUS][rank] = DEAD
    else:
        values[STATUS][rank] = UNRESPONSIVE if status.get("unresponsive") is True else NO_COMMUNICATOR


def _read_place(entry: dict[str, Any]) -> RankPlace | None:
    host, pid, device = (
        entry.get("host"),
        to_natural(entry.get("pid")),
        to_natural(entry.get("cuda_dev"), 1 << 31),
    )
    if not isinstance(host, str) or not host or len(host) > _MAX_NAME or pid is None or device is None:
        return None
    return RankPlace(host, pid, device)
