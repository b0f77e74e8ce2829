"""Reads the calls in Flight Recorder dumps as tuples, without tables, to compare thousands of ranks in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etloom.core.calls import Call, DumpedCalls, find_call_site, get_state, name_group
from etloom.core.categories import parse_collective
from etloom.core.schema import Stat
from etloom.formats.flight_recorder.dump import (
    count_elements,
    explain_unnumbered,
    find_group,
    find_peer,
    format_frames,
    list_entries,
    load_dump,
    parse_ranks,
    read_groups,
    split_group,
    to_int,
)
from etloom.formats.flight_recorder.process_facts import read_process_facts


def read_calls(path: Path, *, limit: int = 256 << 20) -> DumpedCalls:
    """Read the collective and point-to-point calls, the process groups and the process facts in one rank's dump.

    Args:
        path: the dump.
        limit: the largest accepted size of the decompressed file in bytes.

    Raises:
        ReadError: the file cannot be read or is not a dump.
        LimitError: the file is too large.
    """
    stats: list[Stat] = []
    dump = load_dump(path, limit, stats)
    groups = read_groups(dump.get("pg_config"))
    members: dict[str, tuple[int, ...]] = {}
    rows, damaged = [], 0
    for entry in list_entries(dump, path):
        row = _build_call(entry, groups, members) if isinstance(entry, dict) else None
        if row is None:
            damaged += 1
        else:
            rows.append(row)
    if unnumbered := sum(row[1] is None for row in rows):
        stats.append(explain_unnumbered(unnumbered))
    if damaged:
        reason = "an entry without profiling_name or time_created_ns"
        stats.append(Stat("read.damaged_entry", "data_loss", damaged, reason))
    process, invalid = read_process_facts(dump.get("process"))
    if invalid:
        stats.append(
            Stat(
                "read.damaged_entry",
                "data_loss",
                invalid,
                "a fact about the process that has an unexpected type",
            )
        )
    return DumpedCalls(rows, members, process, stats)


def _build_call(
    entry: dict[str, Any], groups: dict[str, dict[str, Any]], members: dict[str, tuple[int, ...]]
) -> Call | None:
    """Convert a dump's entry to a `CALL_COLUMNS` tuple and add its group to ``members``; None without name or time."""
    name, created = entry.get("profiling_name"), to_int(entry.get("time_created_ns"))
    if not isinstance(name, str) or not created:
        return None
    pg_name, pg_desc = split_group(entry.get("process_group"))
    group = name_group(*(text if isinstance(text, str) else None for text in (pg_name, pg_desc)))
    if group not in members and (ranks := find_group(pg_name, pg_desc, groups).get("ranks")):
        members[group] = parse_ranks(ranks)
    is_p2p = bool(entry.get("is_p2p"))
    dtypes, frames = entry.get("input_dtypes"), entry.get("frames")
    return (
        group,
        to_int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        is_p2p,
        parse_collective(name),
        dtypes[0] if isinstance(dtypes, list) and dtypes and isinstance(dtypes[0], str) else None,
        count_elements(entry.get("input_sizes")),
        count_elements(entry.get("output_sizes")),
        find_peer(name) if is_p2p else None,
        get_state(name, entry.get("state"), entry.get("retired")),
        created,
        find_call_site(format_frames(frames)) if frames else None,
    )
