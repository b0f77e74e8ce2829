"""JSON of NCCL's profiler plugin (ext-profiler/example): groups, collectives, messages, proxy steps, kernel channels.

A collective (COLL) or message (P2P) is an event of category ``nccl_collective`` and a row of comms: communicator hash,
sequence number, count and type, and in ``args`` algorithm, protocol and channels. Its time is the time of its kernel
over all channels (KernelCh), if the file has it; else its duration is unknown. Other begin and end pairs are events of
the categories ``nccl_group``, ``nccl_proxy``, ``nccl_gpu``, ``nccl_net``, ... The rank is the rank in the communicator.
If a process drives several GPUs (several ranks of a communicator), its file is a Job.

Times are in microseconds since the plugin started. Format: ext-profiler/example/print_event.cc of NCCL, 2.23 to 2.28.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.categories import itemsize
from etloom.core.errors import ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Job, Trace
from etloom.formats import kineto
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, open_decompressed
from etloom.formats.io.json_text import load_json
from etloom.formats.tables.building import build_trace
from etloom.formats.tables.meta_checks import is_rank
from etloom.formats.tables.nccl_tables import build_communication_tables, count_elements, format_hash

_CALLS = ("COLL", "P2P")
_HEAD_BYTES = 1 << 16


def sniff(head: bytes) -> bool:
    """Return whether the file is a JSON list of events from NCCL's profiler plugin, such as events with CommHash."""
    text = head.lstrip()
    return text[:1] == b"[" and b'"ph"' in text and kineto.is_nccl_profile(text)


def read(path: Path) -> Trace | Job:
    """Read the events of one process; its collectives and point-to-point calls are also rows of comms.

    The result is a Job if the process drives several GPUs.

    Raises:
        ReadError: The file has no event of the plugin.
        LimitError: For a decompression bomb.
    """
    source = kineto.read(path)
    pairs, open_count, endless = _pair_events(source.events)
    if pairs.is_empty():
        raise ReadError("contains no complete event (begin and end) of NCCL's profiler plugin", where=path)
    stats = [Stat(*row) for row in source.stats.iter_rows()]
    stats.append(Stat("read.negative_dur", "data_loss", endless, "ends at 0 or before the begin, now null"))
    stats.append(Stat("read.nccl_unfinished", "info", open_count, "begin events without an end"))
    calls = _add_kernels(
        pairs.filter(pl.col("source_cat").is_in(_CALLS)), pairs.filter(pl.col("source_cat") == "GPU")
    )
    rows = [
        {**_build_row(call), "end_position": call["end_position"]} for call in calls.iter_rows(named=True)
    ]
    others = pairs.filter(~pl.col("source_cat").is_in(_CALLS)).drop("source_cat")
    meta = {**source.meta, "formats": ["nccl-profiler"], "files": [str(path)]}
    members = _list_members(rows)
    if len(members) < 2:
        ranks = {row["rank"] for row in rows} - {None}
        rank = ranks.pop() if len(ranks) == 1 else None
        tables = build_communication_tables(rows, others.drop("end_position"), stats)
        return build_trace(tables, {**meta, "rank": rank}, stats)
    return Job(_split_ranks(rows, others, members, meta, stats), {"formats": meta["formats"]})


def _list_members(rows: list[dict[str, Any]]) -> list[int]:
    """Return the ranks of the communicator of which the process has most ranks."""
    members: dict[str | None, set[int]] = {}
    for row in rows:
        if row["rank"] is not None:
            members.setdefault(row["pg_name"], set()).add(row["rank"])
    return sorted(max(members.values(), key=len, default=()))


def _split_ranks(
    rows: list[dict[str, Any]],
    others: pl.DataFrame,
    members: list[int],
    meta: dict[str, Any],
    stats: list[Stat],
) -> dict[int, Trace]:
    """Return a Trace per rank of a process with several GPUs.

    Other events belong to the rank of the call around them, else of the next one. A communicator in which the ranks
    have other numbers does not state which GPU its calls are of: they are left out.
    """
    by_name: dict[str | None, set[int | None]] = {}
    for row in rows:
        by_name.setdefault(row["pg_name"], set()).add(row["rank"])
    same = {name for name, ranks in by_name.items() if ranks - {None} == set(members)}
    placed = [row for row in rows if row["pg_name"] in same and row["rank"] is not None]
    stats.append(
        Stat(
            "read.nccl_unknown_device",
            "data_loss",
            len(rows) - len(placed),
            "calls without a rank, or of communicators of some of the process's GPUs: which GPU is not stated",
        )
    )
    calls = pl.DataFrame(
        [{name: row[name] for name in ("position", "end_position", "rank")} for row in placed],
        schema={"position": others.schema["position"], "end_position": pl.Int64, "rank": pl.Int64},
    ).sort("position")
    around = others.select("position").sort("position").join_asof(calls, on="position")
    after = around.select("position").join_asof(calls, on="position", strategy="forward")["rank"]
    is_inside = around["position"] < around["end_position"]
    owner = around.select(
        "position", owner=pl.when(is_inside).then("rank").otherwise(pl.coalesce(after, "rank"))
    )
    owned = others.join(owner, on="position", how="left").drop("end_position")
    traces = {}
    for rank in members:
        own_stats = stats if rank == min(members) else []
        own_rows = [row for row in placed if row["rank"] == rank]
        tables = build_communication_tables(own_rows, owned.filter(owner=rank).drop("owner"), own_stats)
        traces[rank] = build_trace(tables, {**meta, "rank": rank}, own_stats)
    return traces


def find_rank(path: Path) -> int | None:
    """Return the rank that the first communication event records; None if the first 64 KiB contain no such event."""
    try:
        with open_decompressed(path) as stream:
            head = stream.read(_HEAD_BYTES)
    except DECOMPRESSION_ERRORS:
        return None
    for line in head.decode("utf-8", "replace").splitlines():
        if '"CommHash"' in line:
            try:
                rank = load_json(line.strip().rstrip(","))["args"]["Rank"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            return rank if is_rank(rank) else None
    return None


def _pair_events(events: pl.DataFrame) -> tuple[pl.DataFrame, int, int]:
    """Join begin and end events (b, e) to complete events; also count begins without an end, and invalid ends.

    Columns are those of ``events``, source_cat, and end_position. The ends of one key are in the order of its begins.
    """
    key = ("source_cat", "name", "pid", "tid", "number")
    text = pl.col("args").cast(pl.String)
    rows = events.sort("position").select(
        "ts", "pid", "tid", "position", "args",
        ph=pl.col("ph").cast(pl.String),
        source_cat=pl.col("cat").cast(pl.String),
        name=pl.col("name").cast(pl.String),
        number=text.str.extract(r'"\.id": ?"?(\w+)'),
    )  # fmt: skip
    turn = pl.int_range(pl.len()).over(*key).alias("turn")
    begins = rows.filter(pl.col("ph") == "b").with_columns(turn)
    ends = rows.filter(pl.col("ph") == "e").with_columns(turn)
    pairs = begins.join(
        ends.select(*key, "turn", end="ts", end_position="position"),
        on=[*key, "turn"], how="inner", nulls_equal=True, maintain_order="left",
    )  # fmt: skip
    table = pairs.select(
        ph=pl.lit("X"),
        cat=pl.lit("nccl_") + pl.col("source_cat").str.to_lowercase(),
        name="name", ts="ts", dur=pl.col("end") - pl.col("ts"), pid="pid", tid="tid",
        args=pl.col("args").cast(pl.String), position="position", end_position="end_position", source_cat="source_cat",
    )  # fmt: skip
    endless = int((table["dur"] < 0).sum())
    return (
        table.with_columns(dur=pl.when(pl.col("dur") >= 0).then("dur")),
        begins.height - pairs.height,
        endless,
    )


def _add_kernels(calls: pl.DataFrame, channels: pl.DataFrame) -> pl.DataFrame:
    """Add kernel_start and kernel_end (ns) and kernel_channels (a count) from each call's kernel channel events.

    The channel events of a call lie between its begin and its end in the file.
    """
    inner = channels.select("position", kernel_start="ts", kernel_end=pl.col("ts") + pl.col("dur")).sort(
        "position"
    )
    outer = calls.select("position", "end_position", call="position").sort("position")
    placed = inner.join_asof(outer, on="position").filter(pl.col("position") < pl.col("end_position"))
    kernels = placed.group_by("call").agg(
        pl.col("kernel_start").min(), pl.col("kernel_end").max(), kernel_channels=pl.len()
    )
    return calls.join(kernels, left_on="position", right_on="call", how="left", maintain_order="left")


def _build_row(call: dict[str, Any]) -> dict[str, Any]:
    args = load_json(call["args"] or "{}")
    args.pop(".id", None)
    name = call["name"] or "(no name)"
    communicator = format_hash(args.pop("CommHash", None))
    count, dtype = (
        _get_natural(args, "Count"),
        str(args.pop("Datatype", "")).removeprefix("nccl").lower() or None,
    )
    rank, size = _get_natural(args, "Rank"), _get_natural(args, "nRanks") or None
    # The call returns before its kernel starts: its time is not the duration of the transfer.
    start, dur, timing = call["ts"], None, "host"
    if call["kernel_start"] is not None:
        start, timing = call["kernel_start"], "kernel"
        dur = None if call["kernel_end"] is None else call["kernel_end"] - start
        dur = dur if dur is not None and dur >= 0 else None
    elements = count_elements(name, count, size)
    width = itemsize(dtype)
    return {
        "name": name,
        "ts": start,
        "dur": dur,
        "pid": call["pid"],
        "tid": call["tid"],
        "position": call["position"],
        "pg_name": communicator,
        "seq": _get_natural(args, "SeqNum"),
        "group_size": size,
        "rank": rank if is_rank(rank) else None,
        "peer": _get_natural(args, "Peer"),
        "dtype": dtype,
        **elements,
        "bytes": None if width is None or elements["in_nelems"] is None else elements["in_nelems"] * width,
        "details": {
            "algorithm": args.pop("Algorithm", None),
            "protocol": args.pop("Protocol", None),
            "channels": _get_natural(args, "nChannels") or call["kernel_channels"],
            "message_bytes": _compute_message_bytes(elements, width),
            "count": count,
            "timing": timing,
            **args,
        },
    }


def _compute_message_bytes(elements: dict[str, int | None], width: int | None) -> int | None:
    counts = list(elements.values())
    if width is None or None in counts:
        return None
    return max(count for count in counts if count is not None) * width


def _get_natural(args: dict[str, Any], key: str) -> int | None:
    value = args.pop(key, None)
    return value if type(value) is int and 0 <= value < 1 << 62 else None
