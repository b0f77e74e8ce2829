"""PyTorch's memory snapshots: the actions of each device's caching allocator, with the Python stack of allocations.

Supported: the pickle of torch.cuda.memory._dump_snapshot, read in pieces and without running any code, and the same
dictionary as JSON. The table allocator has every entry of the history, and the segments and blocks of the snapshot. An
allocation and its release (at the request; at the completion if skip_actions excluded the requests) are also rows of
memory. Other actions of the allocator, such as taking a segment from the driver or running out of memory, are also
events, and so are annotations recorded with the history (global_record_annotations). Sizes are as requested, before the
allocator rounds them up; total_rounded is the sum of its blocks: as the snapshot states them, others rounded up to
512 B. Totals are computed backwards from the segments and blocks of the snapshot, so they include memory allocated
before the history begins. The file does not contain its rank; that is in its name.

Format: torch/cuda/memory.py (_snapshot), with time_us as PyTorch 2.2 and later write it.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import polars as pl

from etloom import _native
from etloom.core.errors import LimitError, ReadError
from etloom.core.schema import SIZE_LIMIT, Stat
from etloom.core.trace import Trace
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, read_chunks, read_content
from etloom.formats.io.json_text import load_json, to_natural
from etloom.formats.io.limits import max_table_bytes
from etloom.formats.tables.building import build_frame, build_trace, sort_events

_ROUNDING = 512
"""The allocator rounds sizes up to multiples of this, in bytes, or more."""
_KEYS = re.compile(rb'\s*\{\s*"(?:segments|device_traces|allocator_settings|external_annotations)"\s*:')
_CUDA = 1
_ALLOC = "alloc"
_FREES = ("free_requested", "free_completed")
_LIVE = "active_allocated"
_PENDING = ("active_pending_free", "active_awaiting_free")
"""States of blocks: in use; freed, but another stream may still use them."""
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_OTHER = ("oom", "snapshot", "workspace_snapshot")
_ACTIONS = (_ALLOC, *_FREES, *_RESERVED, *_OTHER)
_PROBLEMS = {
    "damaged_entry": "an entry without action, address or size",
    "unknown_action": "an unknown action of the allocator",
    "without_time": "entries without time_us; PyTorch 2.2 and later write it",
    "totals_unknown": "the history does not match the segments",
    "unpaired_annotation": "an annotation with only its begin or its end",
}
"""Name of a stat (without read.) -> its description."""
_NUMBERS = ("time", "addr", "size", "stream", "device_free")
_MAX_TIME_US = 1 << 52


def sniff(head: bytes) -> bool:
    """Return whether a file is a memory snapshot, judging from its first bytes ``head``; pickles are not unpickled."""
    if head[:1] == b"\x80":
        return b"segments" in head[:256] and (b"total_size" in head or b"device_traces" in head)
    return _KEYS.match(head) is not None and (b'"total_size"' in head or b'"device_traces"' in head)


def read(
    path: Path,
    *,
    limit: Annotated[int | None, "the largest accepted size of the decompressed file in bytes"] = None,
) -> Trace:
    """Read a snapshot of one rank: allocations and releases as rows of memory, other allocator actions as events.

    Raises:
        ReadError: If the file cannot be read or is not a snapshot.
        LimitError: If the file is too large.
    """
    content = _parse(path, limit)
    rest = content["rest"]
    segments = rest.get("segments")
    segments = [item for item in segments if isinstance(item, dict)] if isinstance(segments, list) else []
    counts = dict.fromkeys(_PROBLEMS, 0)
    stats: list[Stat] = []
    stacks = _format_stacks(content["frames"], content["stacks"])
    entries = _select_entries(content, stacks, counts)
    memory = _compute_totals(entries, _sum_segments(segments), counts)
    events = _list_events(entries) + _pair_annotations(rest.get("external_annotations"), counts)
    ends = build_frame("allocator", _list_contents(segments, stacks), stats) if segments else None
    stats += [
        Stat(f"read.{name}", "info" if name == "without_time" else "data_loss", counts[name], description)
        for name, description in _PROBLEMS.items()
    ]
    settings = rest.get("allocator_settings")
    meta = {
        "formats": ["memory_snapshot"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "header": {"allocator_settings": settings} if isinstance(settings, dict) else {},
    }
    columns = ("ts", "device", "action", "addr", "bytes", "stream", "pool", "stack", "annotation")
    history = entries.select(columns)
    tables = {
        "allocator": pl.concat(
            [history, *([] if ends is None else [ends.drop("id")])], how="diagonal_relaxed"
        ),
        "memory": memory if memory["ts"].is_sorted() else memory.sort("ts", maintain_order=True),
    }
    tables = {name: table.with_row_index("id") for name, table in tables.items()}
    if events:
        table = build_frame("events", events, stats).drop("id")
        tables["events"] = sort_events(table).with_row_index("id")
    return build_trace(tables, meta, stats)


def _parse(path: Path, limit: int | None) -> dict[str, Any]:
    """Return the snapshot in the form of `etloom._native.SnapshotParser`."""
    parser = _native.SnapshotParser()
    pieces = read_chunks(path, max_table_bytes() // 2 if limit is None else limit)
    damage = None
    try:
        first = next(pieces, b"")
        if first[:1] == b"\x80":
            parser.feed(first)
            for piece in pieces:
                parser.feed(piece)
        else:
            data, damage = read_content(path, 1 << 30 if limit is None else limit)
            parser.feed(pickle.dumps(load_json(data), protocol=4))
        content: dict[str, Any] = parser.finish()
    except DECOMPRESSION_ERRORS as error:
        raise ReadError(f"is damaged: {error}", where=path) from None
    except OSError as error:
        raise ReadError(f"cannot be read: {error}", where=path) from None
    except RuntimeError as error:
        remedy = "write it as JSON: json.dump(torch.cuda.memory._snapshot(), file)"
        raise ReadError(str(error), where=path, remedy=remedy) from None
    except ValueError as error:
        if str(error).startswith("contains the same"):
            remedy = "by references in the pickle, so it is not expanded"
            raise LimitError(f"{error} ({remedy})", where=path) from None
        raise ReadError(f"is not valid JSON: {damage or error}", where=path) from None
    except RecursionError as error:
        raise ReadError(f"is not valid JSON: {error}", where=path) from None
    if "row" not in content:
        raise ReadError(
            "is not a memory snapshot with a history: it has no device_traces",
            where=path,
            remedy="call torch.cuda.memory._record_memory_history() before the code to record",
        )
    return content


def _format_stacks(frames: list[Any], stacks: list[list[int]]) -> pl.Series:
    """Return the text of each stack: a JSON list of "name (file:line)", innermost frame first."""
    texts = [
        f"{frame.get('name')} ({frame.get('filename')}:{frame.get('line')})"
        if isinstance(frame, dict)
        else None
        for frame in frames
    ]
    lists = [[text for number in stack if (text := texts[number]) is not None] for stack in stacks]
    return pl.Series([json.dumps(texts) for texts in lists], dtype=pl.String)


def _gather(texts: pl.Series, numbers: pl.Series) -> pl.Series:
    """Return the text of each number as a category, null for null."""
    return texts.cast(pl.Categorical).gather(numbers)


def _select_rows(table: pl.DataFrame, condition: pl.Expr) -> pl.DataFrame:
    """Return the rows that satisfy a condition; without a copy of the table if all do."""
    condition = condition.fill_null(False)
    return table if table.select(condition.all()).item() else table.filter(condition)


def _select_entries(content: dict[str, Any], stacks: pl.Series, counts: dict[str, int]) -> pl.DataFrame:
    """Return the known entries of the history in its order, with ``position``, their place in it; count others."""
    row = content.pop("row")
    row = slice(None) if row is None else row
    texts = pl.Series(content["texts"], dtype=pl.String)

    def take(name: str) -> pl.Series:
        column = pl.Series(content.pop(name)[row])
        return column.set(column < 0, None) if len(column) and column.min() < 0 else column  # type: ignore[operator]

    entries = pl.DataFrame(
        {
            "device": content.pop("device"),
            "ts": take("time"),
            "addr": take("addr"),
            "bytes": take("size"),
            "stream": take("stream"),
            "action": _gather(texts, take("action")),
            "stack": _gather(stacks, take("stack")),
            "annotation": _gather(texts, take("annotation")),
            "pool": _gather(texts, take("pool")),
            "device_free": take("device_free"),
        }
    ).with_row_index("position")
    is_damaged = pl.col("action").is_null() | pl.col("bytes").is_null() | (pl.col("bytes") > SIZE_LIMIT)
    whole = _select_rows(entries, ~is_damaged)
    counts["damaged_entry"] += content["damaged"] + entries.height - whole.height
    recognized = _select_rows(whole, pl.col("action").is_in(_ACTIONS))
    counts["unknown_action"] += whole.height - recognized.height
    counts["without_time"] += recognized["ts"].null_count()
    is_oom = pl.col("action") == "oom"
    return recognized.with_columns(
        pl.when(pl.col("ts") < _MAX_TIME_US).then(pl.col("ts") * 1000),
        addr=pl.when(is_oom).then("device_free").otherwise("addr"),
        annotation=pl.when(pl.col("annotation") != "").then("annotation"),
    )


def _compute_totals(entries: pl.DataFrame, usages: dict[int, _Usage], counts: dict[str, int]) -> pl.DataFrame:
    """Return the rows of memory: the entries that change the allocated bytes, with the totals after each."""
    tables = []
    # Without a copy of the usual case of one device.
    has_one_device = entries["device"].n_unique() == 1
    for rows in [entries] if has_one_device else entries.partition_by("device", maintain_order=True):
        usage = usages.get(int(rows["device"][0]), _Usage(0, 0, 0, 0, {}))
        present = rows["action"].unique().to_list()
        only_completed = _FREES[1] in present and _FREES[0] not in present
        free = _FREES[only_completed]
        action, size = pl.col("action"), pl.col("bytes")
        is_change = action.is_in([_ALLOC, free])
        changes = rows.filter(is_change | action.is_in(list(_RESERVED))).select(
            "ts", "addr", "device", "stream", "stack",
            bytes=pl.when(action == _ALLOC).then(size).when(action == free).then(-size).otherwise(0),
            reserved=pl.when(action.is_in([name for name, sign in _RESERVED.items() if sign > 0])).then(size)
            .when(action.is_in([name for name, sign in _RESERVED.items() if sign < 0])).then(-size).otherwise(0),
            is_change=is_change,
        )  # fmt: skip
        changes = changes.with_columns(rounded=_round_sizes(changes, usage.blocks))
        ends = {
            "bytes": ("total_allocated", usage.live + usage.pending * only_completed),
            "reserved": ("total_reserved", usage.reserved),
            "rounded": ("total_rounded", usage.rounded),
        }
        for column, (name, end) in ends.items():
            first = end - int(changes[column].sum())
            total = first + changes[column].cum_sum()
            is_consistent = first >= 0 and bool((total >= 0).all())
            counts["totals_unknown"] += 0 if is_consistent or column == "rounded" else changes.height
            known = total if is_consistent else pl.lit(None, pl.Int64)
            changes = changes.with_columns(known.alias(name)).drop([] if column == "bytes" else column)
        requests = changes.drop("is_change") if changes["is_change"].all() else changes.filter("is_change")
        requests = requests.drop("is_change", strict=False)
        tables.append(requests.with_columns(device_type=pl.lit(_CUDA, pl.Int32)))
    return pl.concat(tables) if tables else pl.DataFrame(schema={"ts": pl.Int64})


def _round_sizes(changes: pl.DataFrame, blocks: dict[int, tuple[int, int]]) -> pl.Series:
    """Return the change of the bytes of blocks by each entry: of a block that is still in use as the snapshot states
    it, of others the size rounded up.

    Args:
        changes: addr, bytes (negative for a release), is_change.
        blocks: of the snapshot, by address.
    """
    change = changes["bytes"].to_numpy()
    size = -(-np.abs(change) // _ROUNDING) * _ROUNDING
    in_use = pl.col("is_change") & pl.col("addr").is_in(list(blocks))
    last = changes.select("addr", "is_change").with_row_index().filter(in_use).unique("addr", keep="last")
    rows, stated = last["index"].to_numpy(), [blocks[address][1] for address in last["addr"].to_list()]
    size[rows] = np.where(change[rows] > 0, np.maximum(change[rows], np.array(stated, np.int64)), size[rows])
    return pl.Series(np.sign(change) * size)


def _list_events(entries: pl.DataFrame) -> list[dict[str, Any]]:
    """List the actions of the allocator that are neither requests nor releases as rows of events."""
    others = entries.filter(pl.col("action").is_in([*_RESERVED, *_OTHER]) & pl.col("ts").is_not_null())
    events = []
    for row in others.iter_rows(named=True):
        is_oom = row["action"] == "oom"
        details = {
            "bytes": row["bytes"],
            "address": None if is_oom else row["addr"],
            "device_free": row["device_free"],
        }
        args = {key: value for key, value in details.items() if value is not None}
        events.append(
            {
                "ph": "i", "cat": "memory_snapshot", "name": row["action"], "ts": row["ts"], "device": row["device"],
                "stream": row["stream"], "args": json.dumps(args), "position": row["position"],
            }
        )  # fmt: skip
    return events


def _list_contents(segments: list[dict[str, Any]], stacks: pl.Series) -> list[dict[str, Any]]:
    """List the segments and blocks of the snapshot as rows of the table allocator."""
    rows: list[dict[str, Any]] = []
    for segment in segments:
        pool = segment.get("segment_pool_id")
        kind = str(segment.get("segment_type")) + " expandable" * (segment.get("is_expandable") is True)
        common = {
            "device": to_natural(segment.get("device")) or 0,
            "stream": to_natural(segment.get("stream")),
        }
        address = to_natural(segment.get("address"))
        size = to_natural(segment.get("total_size"))
        private = json.dumps(pool) if isinstance(pool, list) and any(pool) else None
        rows.append(
            {**common, "action": "segment", "addr": address, "bytes": size, "pool": private, "kind": kind}
        )
        blocks = segment.get("blocks")
        for block in blocks if isinstance(blocks, list) else []:
            if not isinstance(block, dict):
                continue
            size, stack, state = (to_natural(block.get("size")), block.get("frames"), block.get("state"))
            rows.append(
                {
                    **common,
                    "action": "block",
                    "addr": to_natural(block.get("address", block.get("addr", address))),
                    "bytes": to_natural(block.get("requested_size", size)),
                    "rounded": size,
                    "kind": state if isinstance(state, str) else None,
                    "stack": stacks[stack] if isinstance(stack, int) and 0 <= stack < len(stacks) else None,
                }
            )
            address = None if address is None or size is None else address + size
    return rows


class _Usage(NamedTuple):
    """The memory of a device at the time of the snapshot, in bytes.

    ``live`` (in use) and ``pending`` (freed, but not yet reusable) count sizes as requested, ``rounded`` the blocks in
    use. ``blocks``: address of a block in use -> its size as requested, and its size.
    """

    live: int
    pending: int
    reserved: int
    rounded: int
    blocks: dict[int, tuple[int, int]]


def _sum_segments(segments: list[dict[str, Any]]) -> dict[int, _Usage]:
    """Return the memory in use at the time of the snapshot by device."""
    by_device: dict[int, _Usage] = {}
    for segment in segments:
        device = to_natural(segment.get("device")) or 0
        usage = by_device.get(device, _Usage(0, 0, 0, 0, {}))
        sizes, rounded = dict.fromkeys((_LIVE, *_PENDING), 0), 0
        blocks = segment.get("blocks")
        for block in blocks if isinstance(blocks, list) else []:
            if isinstance(block, dict) and isinstance(state := block.get("state"), str) and state in sizes:
                requested = to_natural(block.get("requested_size", block.get("size"))) or 0
                sizes[state] += requested
                if state == _LIVE:
                    size = max(requested, to_natural(block.get("size")) or 0)
                    address = to_natural(block.get("address", block.get("addr")))
                    rounded += size
                    usage.blocks.update({} if address is None else {address: (requested, size)})
        by_device[device] = _Usage(
            usage.live + sizes[_LIVE],
            usage.pending + sum(sizes[state] for state in _PENDING),
            usage.reserved + (to_natural(segment.get("total_size")) or 0),
            usage.rounded + rounded,
            usage.blocks,
        )
    return by_device


def _pair_annotations(annotations: Any, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Convert START and END annotations to events; an END closes the last open START of the same name."""
    open_starts: dict[str, list[int]] = {}
    ranges: list[dict[str, Any]] = []
    for entry in annotations if isinstance(annotations, list) else []:
        fields = entry if isinstance(entry, dict) else {}
        name, stage, time = fields.get("name"), fields.get("stage"), to_natural(fields.get("time_us"))
        if isinstance(name, str) and stage == "START" and time is not None:
            open_starts.setdefault(name, []).append(time)
        elif isinstance(name, str) and stage == "END" and time is not None and open_starts.get(name):
            start = open_starts[name].pop()
            span = {"ts": start * 1000, "dur": max(0, time - start) * 1000, "pid": 0, "tid": 0}
            ranges.append(
                {"ph": "X", "cat": "user_annotation", "name": name, **span, "position": len(ranges)}
            )
        else:
            counts["unpaired_annotation"] += 1
    counts["unpaired_annotation"] += sum(map(len, open_starts.values()))
    return ranges
