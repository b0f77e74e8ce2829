"""PyTorch's memory snapshots: the actions of each device's caching allocator, with the Python stack of allocations.

Supported: the pickle of torch.cuda.memory._dump_snapshot, read without running any code, and the same dictionary as
JSON. An allocation and its release (at the request; at the completion if skip_actions excluded the requests) are rows
of memory. Other actions of the allocator, such as allocating a segment from the driver or running out of memory, are
events, and so are annotations recorded with the history (global_record_annotations). Sizes are as requested, before the
allocator rounds them up; total_rounded is the sum of its blocks: as the snapshot states them, others rounded up to
512 B. Totals are computed backwards from the segments and blocks of the snapshot, so they include memory allocated
before the history begins. The file does not contain its rank; that is in its name.

Format: torch/cuda/memory.py (_snapshot), with time_us as PyTorch 2.2 and later write it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from etloom.core.errors import LimitError, ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io import safe_pickle
from etloom.formats.io.compression import read_content
from etloom.formats.io.json_text import load_json
from etloom.formats.tables.building import build_frame, build_trace, sort_events

_ROUNDING = 512
"""The allocator rounds sizes up to multiples of this, in bytes, or more."""
_KEYS = re.compile(rb'\s*\{\s*"(?:segments|device_traces|allocator_settings|external_annotations)"\s*:')
_MAX_FRAMES = 256
_CUDA = 1
_SIGNS = {"alloc": 1, "free_requested": -1}
_SIGNS_WITHOUT_REQUESTS = {"alloc": 1, "free_completed": -1}
"""Actions that change the allocated bytes; the second if the history does not have the requests."""
_LIVE = "active_allocated"
_PENDING = ("active_pending_free", "active_awaiting_free")
"""States of blocks: in use; freed, but another stream may still use them."""
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_OTHER = {"free_requested", "free_completed", "oom", "snapshot", "workspace_snapshot"}
_PROBLEMS = {
    "damaged_entry": "an entry without action, address or size",
    "unknown_action": "an unknown action of the allocator",
    "without_time": "entries without time_us; PyTorch 2.2 and later write it",
    "totals_unknown": "the history does not match the segments",
    "unpaired_annotation": "an annotation with only its begin or its end",
}
"""Name of a stat (without read.) -> its description."""


def sniff(head: bytes) -> bool:
    """Return whether a file is a memory snapshot, judging from its first bytes ``head``; pickles are not unpickled."""
    if head[:1] == b"\x80":
        return b"segments" in head[:256] and (b"total_size" in head or b"device_traces" in head)
    return _KEYS.match(head) is not None and (b'"total_size"' in head or b'"device_traces"' in head)


def read(path: Path, *, limit: int = 1 << 30) -> Trace:
    """Read a snapshot of one rank: allocations and releases as rows of memory, other allocator actions as events.

    limit: the largest accepted size of the decompressed file in bytes.

    Raises:
        ReadError: If the file cannot be read or is not a snapshot.
        LimitError: If the file is too large.
    """
    data, damage = read_content(path, limit)
    snapshot = _load_snapshot(data, damage, path)
    history = _to_lists(snapshot.get("device_traces"))
    segments = snapshot.get("segments")
    segments = [item for item in segments if isinstance(item, dict)] if isinstance(segments, list) else []
    # Lists may be shared, so that a short file takes long to walk.
    entries_to_walk = sum(map(len, history)) + sum(
        len(blocks) for blocks in _to_lists([segment.get("blocks") for segment in segments])
    )
    if entries_to_walk > len(data):
        raise LimitError(
            "contains the same lists of entries many times (by references in the pickle), so it is not expanded",
            where=path,
        )
    counts = dict.fromkeys(_PROBLEMS, 0)
    memory, events = _convert_history(history, _sum_segments(segments), counts)
    allocator = _list_entries(history, segments, counts)
    events += _pair_annotations(snapshot.get("external_annotations"), counts)
    stats = [
        Stat(f"read.{name}", "data_loss", counts[name], description)
        for name, description in _PROBLEMS.items()
    ]
    settings = snapshot.get("allocator_settings")
    meta = {
        "formats": ["memory_snapshot"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "header": {"allocator_settings": settings} if isinstance(settings, dict) else {},
    }
    return build_trace(_build_tables(memory, events, allocator, stats), meta, stats)


def _convert_history(
    history: list[list[Any]], in_use: dict[int, _Usage], counts: dict[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Convert the allocator entries of all devices to rows of the memory table and rows of the events table."""
    stacks = _StackTexts()
    memory: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for device, entries in enumerate(history):
        usage = in_use.get(device, _Usage(0, 0, 0, 0, {}))
        actions = [entry.get("action") for entry in entries if isinstance(entry, dict)]
        only_completed = "free_completed" in actions and "free_requested" not in actions
        signs = _SIGNS_WITHOUT_REQUESTS if only_completed else _SIGNS
        rows, device_events = _convert_entries(device, entries, signs, stacks, counts)
        _add_rounded_sizes(rows, usage.blocks)
        allocated = usage.live + usage.pending * only_completed
        _add_totals(rows, (allocated, usage.reserved, usage.rounded), counts)
        memory += [row for row in rows if row.pop("action") in signs]
        events += device_events
    return memory, events


def _load_snapshot(data: bytes, damage: str | None, path: Path) -> dict[str, Any]:
    if data[:1] == b"\x80":
        remedy = "write it as JSON: json.dump(torch.cuda.memory._snapshot(), file)"
        snapshot = safe_pickle.load_plain_values(data, path, max_values=None, remedy=remedy)
    else:
        try:
            snapshot = load_json(data)
        except (ValueError, RecursionError) as error:
            raise ReadError(f"is not valid JSON: {damage or error}", where=path) from None
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise ReadError(
            "is not a memory snapshot with a history: it has no device_traces",
            where=path,
            remedy="call torch.cuda.memory._record_memory_history() before the code to record",
        )
    return snapshot


def _to_lists(value: Any) -> list[list[Any]]:
    return [item if isinstance(item, list) else [] for item in value] if isinstance(value, list) else []


def _to_int(value: Any) -> int | None:
    """Return the value if it is an integer from 0 to 2**63 - 1 (a size, time or address), otherwise None."""
    is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
    return value if is_valid else None


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
        device = _to_int(segment.get("device")) or 0
        usage = by_device.get(device, _Usage(0, 0, 0, 0, {}))
        sizes, rounded = dict.fromkeys((_LIVE, *_PENDING), 0), 0
        blocks = segment.get("blocks")
        for block in blocks if isinstance(blocks, list) else []:
            if isinstance(block, dict) and isinstance(state := block.get("state"), str) and state in sizes:
                requested = _to_int(block.get("requested_size", block.get("size"))) or 0
                sizes[state] += requested
                if state == _LIVE:
                    size = max(requested, _to_int(block.get("size")) or 0)
                    address = _to_int(block.get("address", block.get("addr")))
                    rounded += size
                    usage.blocks.update({} if address is None else {address: (requested, size)})
        by_device[device] = _Usage(
            usage.live + sizes[_LIVE],
            usage.pending + sum(sizes[state] for state in _PENDING),
            usage.reserved + (_to_int(segment.get("total_size")) or 0),
            usage.rounded + rounded,
            usage.blocks,
        )
    return by_device


def _convert_entries(
    device: int, entries: list[Any], signs: dict[str, int], stacks: _StackTexts, counts: dict[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Convert the allocator entries of one device to rows of memory and rows of events.

    Returns:
        The entries that change a total (rows of memory, with ``action``), and events for all that are not in memory.
    """
    rows, events = [], []
    for position, entry in enumerate(entries):
        action = entry.get("action") if isinstance(entry, dict) else None
        size = _to_int(entry.get("size")) if isinstance(entry, dict) else None
        if not isinstance(action, str) or size is None:
            counts["damaged_entry"] += 1
            continue
        changes = action in signs or action in _RESERVED
        if not changes and action not in _OTHER:
            counts["unknown_action"] += 1
            continue
        time, address = _to_int(entry.get("time_us")), _to_int(entry.get("addr"))
        counts["without_time"] += time is None
        row = {
            "action": action,
            "ts": None if time is None else time * 1000,
            "addr": address,
            "bytes": size * signs.get(action, 0),
            "reserved": size * _RESERVED.get(action, 0),
            "device_type": _CUDA,
            "device": device,
            "stream": _to_int(entry.get("stream")),
            "stack": stacks.text(entry.get("frames")),
        }
        if changes:
            rows.append(row)
        if action not in signs and time is not None:
            details = {"bytes": size, "address": address, "device_free": _to_int(entry.get("device_free"))}
            args = {key: value for key, value in details.items() if value is not None}
            events.append(
                {
                    "ph": "i", "cat": "memory_snapshot", "name": action, "ts": row["ts"], "device": device,
                    "stream": row["stream"], "args": json.dumps(args), "position": position,
                }
            )  # fmt: skip
    return rows, events


def _list_entries(
    history: list[list[Any]], segments: list[dict[str, Any]], counts: dict[str, int]
) -> list[dict[str, Any]]:
    """List the entries of the history as rows of the table allocator, then the segments and blocks of the snapshot."""
    stacks, rows = _StackTexts(), []
    for device, entries in enumerate(history):
        for entry in entries:
            if isinstance(entry, dict) and isinstance(action := entry.get("action"), str):
                time = _to_int(entry.get("time_us"))
                rows.append(
                    {
                        "ts": None if time is None else time * 1000,
                        "device": device,
                        "action": action,
                        "addr": _to_int(entry.get("device_free" if action == "oom" else "addr")),
                        "bytes": _to_int(entry.get("size")),
                        "stream": _to_int(entry.get("stream")),
                        "stack": stacks.text(entry.get("frames")),
                        "annotation": entry.get("user_metadata") or None,
                    }
                )
    for segment in segments:
        pool = segment.get("segment_pool_id")
        kind = str(segment.get("segment_type")) + " expandable" * (segment.get("is_expandable") is True)
        common = {"device": _to_int(segment.get("device")) or 0, "stream": _to_int(segment.get("stream"))}
        address = _to_int(segment.get("address"))
        size = _to_int(segment.get("total_size"))
        private = json.dumps(pool) if isinstance(pool, tuple | list) and any(pool) else None
        rows.append(
            {**common, "action": "segment", "addr": address, "bytes": size, "pool": private, "kind": kind}
        )
        blocks = segment.get("blocks")
        for block in blocks if isinstance(blocks, list) else []:
            if isinstance(block, dict):
                size = _to_int(block.get("size"))
                rows.append(
                    {
                        **common,
                        "action": "block",
                        "addr": _to_int(block.get("address", block.get("addr", address))),
                        "bytes": _to_int(block.get("requested_size", size)),
                        "rounded": size,
                        "kind": block.get("state"),
                        "stack": stacks.text(block.get("frames")),
                    }
                )
                address = None if address is None or size is None else address + size
    return rows


def _add_rounded_sizes(rows: list[dict[str, Any]], blocks: dict[int, tuple[int, int]]) -> None:
    """Add ``rounded``, the change of the bytes of blocks, from the last entry to the first.

    Args:
        blocks: of the snapshot, by address.
    """
    sizes = {address: rounded for address, (_, rounded) in blocks.items()}
    for row in reversed(rows):
        requested, address = row["bytes"], row["addr"]
        usual = -(-abs(requested) // _ROUNDING) * _ROUNDING
        if requested < 0:  # before, its block is in use; it is not in the snapshot
            sizes[address] = usual
            row["rounded"] = -usual
        else:
            row["rounded"] = max(requested, sizes.pop(address, usual)) if requested else 0


def _add_totals(rows: list[dict[str, Any]], ends: tuple[int, int, int], counts: dict[str, int]) -> None:
    """Add the totals (bytes after each entry), computed backwards from those at the end.

    Args:
        ends: allocated, reserved and rounded bytes at the end.
    """
    totals = ("total_allocated", "total_reserved", "total_rounded")
    for column, total, end in zip(("bytes", "reserved", "rounded"), totals, ends, strict=True):
        after = [end]
        for row in reversed(rows):
            after.append(after[-1] - row[column])
        is_consistent = min(after) >= 0
        counts["totals_unknown"] += 0 if is_consistent or column == "rounded" else len(rows)
        for row, now in zip(reversed(rows), after, strict=False):
            row[total] = now if is_consistent else None
    for row in rows:
        del row["reserved"], row["rounded"]


def _pair_annotations(annotations: Any, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Convert START and END annotations to events; an END closes the last open START of the same name."""
    open_starts: dict[str, list[int]] = {}
    ranges: list[dict[str, Any]] = []
    for entry in annotations if isinstance(annotations, list) else []:
        fields = entry if isinstance(entry, dict) else {}
        name, stage, time = fields.get("name"), fields.get("stage"), _to_int(fields.get("time_us"))
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


class _StackTexts:
    """Formats Python stacks as JSON lists of "name (file:line)", innermost frame first, and caches the texts.

    Frames are identified by `id`, which is unique as long as the snapshot with all of them is in memory.
    """

    def __init__(self) -> None:
        self._frames: dict[int, str] = {}
        self._texts_by_frames: dict[tuple[int, ...], str] = {}
        self._texts: dict[str, str] = {}

    def text(self, frames: Any) -> str | None:
        if not isinstance(frames, list) or not frames:
            return None
        frames = frames[:_MAX_FRAMES]
        key = tuple(map(id, frames))
        if key not in self._texts_by_frames:
            text = json.dumps([self._frame(frame) for frame in frames if isinstance(frame, dict)])
            self._texts_by_frames[key] = self._texts.setdefault(text, text)
        return self._texts_by_frames[key]

    def _frame(self, frame: dict[str, Any]) -> str:
        if id(frame) not in self._frames:
            self._frames[id(frame)] = f"{frame.get('name')} ({frame.get('filename')}:{frame.get('line')})"
        return self._frames[id(frame)]


def _build_tables(
    memory: list[dict[str, Any]],
    events: list[dict[str, Any]],
    allocator: list[dict[str, Any]],
    stats: list[Stat],
) -> dict[str, pl.DataFrame]:
    tables = {"allocator": build_frame("allocator", allocator, stats).drop("id").with_row_index("id")}
    if memory:
        table = build_frame("memory", memory, stats)
        tables["memory"] = table.drop("id").sort("ts", maintain_order=True).with_row_index("id")
    if events:
        table = build_frame("events", events, stats).drop("id")
        tables["events"] = sort_events(table).with_row_index("id")
    return tables
