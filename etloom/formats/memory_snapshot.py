"""PyTorch's memory snapshots: what the caching allocator of each device did, with the Python stack of each allocation.

Read: the pickle of torch.cuda.memory._dump_snapshot, without running anything that it says, and the same dictionary
as JSON. An allocation and its release (when it was asked for; when it was done, where skip_actions left the requests
out) are rows of memory; what else the allocator did, such as taking a segment from the driver or running out of memory,
is an event, and so are annotations that were recorded with it (global_record_annotations). Sizes are what was asked
for, before the allocator rounds them up to 512 B. Totals are counted backwards from the segments and blocks that the
snapshot found, so what was allocated before the history begins is in them. The file does not say its rank: that is in
its name.

Format: torch/cuda/memory.py (_snapshot), with time_us as PyTorch 2.2 and later write it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import LimitError, ReadError
from etloom.core.schema import Stat
from etloom.core.trace import Trace
from etloom.formats.io import safe_pickle
from etloom.formats.io.compression import read_content
from etloom.formats.tables.building import build_frame, build_trace, sort_events

_KEYS = re.compile(rb'\s*\{\s*"(?:segments|device_traces|allocator_settings|external_annotations)"\s*:')
_MOST_FRAMES = 256
_CUDA = 1
_ALLOCATED = {"alloc": 1, "free_requested": -1}
_WHEN_DONE = {"alloc": 1, "free_completed": -1}
"""What changes the allocated bytes; the second where the history leaves out when they were asked back."""
_LIVE = "active_allocated"
_PENDING = ("active_pending_free", "active_awaiting_free")
"""States of blocks: in use; asked back, but another stream may still use them."""
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_OTHER = {"free_requested", "free_completed", "oom", "snapshot", "workspace_snapshot"}


def sniff(head: bytes) -> bool:
    """Whether the file begins like a snapshot. A pickle is looked at, not read."""
    if head[:1] == b"\x80":
        return b"segments" in head[:256] and (b"total_size" in head or b"device_traces" in head)
    found = _KEYS.match(head)
    return found is not None and (b'"total_size"' in head or b'"device_traces"' in head)


def read(path: Path, *, limit: int = 1 << 30) -> Trace:
    """The Trace of one rank: memory, and events of what the allocator did beside.

    limit: the most bytes that the unpacked file may have. Raises ReadError, LimitError.
    """
    data, cut = read_content(path, limit)
    snapshot = _load_snapshot(data, cut, path)
    stats: list[Stat] = []
    history = _to_lists(snapshot.get("device_traces"))
    segments = snapshot.get("segments")
    segments = [one for one in segments if isinstance(one, dict)] if isinstance(segments, list) else []
    # Lists may be shared, so that a short file is long to walk.
    walked = sum(map(len, history)) + sum(
        len(blocks) for blocks in _to_lists([one.get("blocks") for one in segments])
    )
    if walked > len(data):
        raise LimitError("holds the same entries again and again", where=path)
    held = _sum_segments(segments)
    stacks = _StackTexts()
    memory: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    counts = dict.fromkeys(
        ("damaged_entry", "unknown_action", "without_time", "totals_unknown", "open_annotation"), 0
    )
    for device, entries in enumerate(history):
        live, pending, reserved = held.get(device, (0, 0, 0))
        actions = [one.get("action") for one in entries if isinstance(one, dict)]
        when_done = "free_completed" in actions and "free_requested" not in actions
        changes = _WHEN_DONE if when_done else _ALLOCATED
        own, beside = _convert_entries(device, entries, changes, stacks, counts)
        _add_totals(own, live + pending * when_done, reserved, counts)
        memory += [row for row in own if row.pop("action") in changes]
        events += beside
    events += _pair_annotations(snapshot.get("external_annotations"), counts)
    stats += [
        Stat(
            "read.damaged_entry",
            "data_loss",
            counts["damaged_entry"],
            "an entry without action, address or size",
        ),
        Stat(
            "read.unknown_action",
            "data_loss",
            counts["unknown_action"],
            "what the allocator did there is not known",
        ),
        Stat(
            "read.without_time",
            "data_loss",
            counts["without_time"],
            "entries without time_us; PyTorch 2.2 writes it",
        ),
        Stat(
            "read.totals_unknown",
            "data_loss",
            counts["totals_unknown"],
            "the history does not fit the segments",
        ),
        Stat(
            "read.open_annotation",
            "data_loss",
            counts["open_annotation"],
            "an annotation of which only the begin or the end is there",
        ),
    ]
    settings = snapshot.get("allocator_settings")
    meta = {
        "formats": ["memory_snapshot"],
        "files": [str(path)],
        "clock": "epoch",
        "base_ns": 0,
        "header": {"allocator_settings": settings} if isinstance(settings, dict) else {},
    }
    return build_trace(_build_tables(memory, events, stats), meta, stats)


def _load_snapshot(data: bytes, cut: str | None, path: Path) -> dict[str, Any]:
    if data[:1] == b"\x80":
        remedy = "write it as JSON: json.dump(torch.cuda.memory._snapshot(), file)"
        snapshot = safe_pickle.load_plain_values(data, path, max_values=None, remedy=remedy)
    else:
        try:
            snapshot = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ReadError(f"is no whole JSON: {cut or error}", where=path) from None
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise ReadError(
            "is no memory snapshot with a history: it has no device_traces",
            where=path,
            remedy="call torch.cuda.memory._record_memory_history() before what is to be seen",
        )
    return snapshot


def _to_lists(value: Any) -> list[list[Any]]:
    return [one if isinstance(one, list) else [] for one in value] if isinstance(value, list) else []


def _to_int(value: Any) -> int | None:
    """A number of bytes, microseconds or an address; None for what is none."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
    return value if fits else None


def _sum_segments(segments: list[dict[str, Any]]) -> dict[int, tuple[int, int, int]]:
    """By device, when the snapshot was taken: the bytes (as asked for) in use, those asked back but still waited for,
    and those reserved."""
    found: dict[int, tuple[int, int, int]] = {}
    for segment in segments:
        device = _to_int(segment.get("device")) or 0
        sizes = dict.fromkeys((_LIVE, *_PENDING), 0)
        blocks = segment.get("blocks")
        for block in blocks if isinstance(blocks, list) else []:
            if isinstance(block, dict) and isinstance(state := block.get("state"), str) and state in sizes:
                sizes[state] += _to_int(block.get("requested_size", block.get("size"))) or 0
        live, pending, reserved = found.get(device, (0, 0, 0))
        live, pending = live + sizes[_LIVE], pending + sum(sizes[state] for state in _PENDING)
        found[device] = live, pending, reserved + (_to_int(segment.get("total_size")) or 0)
    return found


def _convert_entries(
    device: int, entries: list[Any], allocated: dict[str, int], stacks: _StackTexts, counts: dict[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What changes a total (rows of memory, and ``action``), and events of all that is no row of memory."""
    rows, events = [], []
    for position, entry in enumerate(entries):
        action = entry.get("action") if isinstance(entry, dict) else None
        size = _to_int(entry.get("size")) if isinstance(entry, dict) else None
        if not isinstance(action, str) or size is None:
            counts["damaged_entry"] += 1
            continue
        changes = action in allocated or action in _RESERVED
        if not changes and action not in _OTHER:
            counts["unknown_action"] += 1
            continue
        time, address = _to_int(entry.get("time_us")), _to_int(entry.get("addr"))
        counts["without_time"] += time is None
        row = {
            "action": action,
            "ts": None if time is None else time * 1000,
            "addr": address,
            "bytes": size * allocated.get(action, 0),
            "reserved": size * _RESERVED.get(action, 0),
            "device_type": _CUDA,
            "device": device,
            "stream": _to_int(entry.get("stream")),
            "stack": stacks.text(entry.get("frames")),
        }
        if changes:
            rows.append(row)
        if action not in allocated and time is not None:
            said = {"bytes": size, "address": address, "device_free": _to_int(entry.get("device_free"))}
            args = {key: value for key, value in said.items() if value is not None}
            events.append(
                {
                    "ph": "i", "cat": "memory_snapshot", "name": action, "ts": row["ts"], "device": device,
                    "stream": row["stream"], "args": json.dumps(args), "position": position,
                }
            )  # fmt: skip
    return rows, events


def _add_totals(rows: list[dict[str, Any]], allocated: int, reserved: int, counts: dict[str, int]) -> None:
    """Put what was allocated and reserved after each entry into it, from what was in the end."""
    for column, total, end in (
        ("bytes", "total_allocated", allocated),
        ("reserved", "total_reserved", reserved),
    ):
        after = [end]
        for row in reversed(rows):
            after.append(after[-1] - row[column])
        known = min(after) >= 0
        counts["totals_unknown"] += 0 if known else len(rows)
        for row, now in zip(reversed(rows), after, strict=False):
            row[total] = now if known else None
    for row in rows:
        del row["reserved"]


def _pair_annotations(found: Any, counts: dict[str, int]) -> list[dict[str, Any]]:
    """The ranges of record_function that were recorded with the history: a begin and the next end of its name."""
    begun: dict[str, list[int]] = {}
    ranges: list[dict[str, Any]] = []
    for entry in found if isinstance(found, list) else []:
        said = entry if isinstance(entry, dict) else {}
        name, stage, time = said.get("name"), said.get("stage"), _to_int(said.get("time_us"))
        if isinstance(name, str) and stage == "START" and time is not None:
            begun.setdefault(name, []).append(time)
        elif isinstance(name, str) and stage == "END" and time is not None and begun.get(name):
            start = begun[name].pop()
            lasted = {"ts": start * 1000, "dur": max(0, time - start) * 1000, "pid": 0, "tid": 0}
            ranges.append(
                {"ph": "X", "cat": "user_annotation", "name": name, **lasted, "position": len(ranges)}
            )
        else:
            counts["open_annotation"] += 1
    counts["open_annotation"] += sum(map(len, begun.values()))
    return ranges


class _StackTexts:
    """Frames as the JSON text of "name (file:line)", innermost first; each frame and each stack put together once.

    Known by their identity, which lasts as long as the snapshot that holds them.
    """

    def __init__(self) -> None:
        self._frames: dict[int, str] = {}
        self._known: dict[tuple[int, ...], str] = {}
        self._texts: dict[str, str] = {}

    def text(self, frames: Any) -> str | None:
        if not isinstance(frames, list) or not frames:
            return None
        frames = frames[:_MOST_FRAMES]
        key = tuple(map(id, frames))
        if key not in self._known:
            text = json.dumps([self._frame(frame) for frame in frames if isinstance(frame, dict)])
            self._known[key] = self._texts.setdefault(text, text)
        return self._known[key]

    def _frame(self, frame: dict[str, Any]) -> str:
        if id(frame) not in self._frames:
            self._frames[id(frame)] = f"{frame.get('name')} ({frame.get('filename')}:{frame.get('line')})"
        return self._frames[id(frame)]


def _build_tables(
    memory: list[dict[str, Any]], events: list[dict[str, Any]], stats: list[Stat]
) -> dict[str, pl.DataFrame]:
    tables = {}
    if memory:
        table = build_frame("memory", memory, stats)
        tables["memory"] = table.drop("id").sort("ts", maintain_order=True).with_row_index("id")
    if events:
        table = build_frame("events", events, stats).drop("id")
        tables["events"] = sort_events(table).with_row_index("id")
    return tables
