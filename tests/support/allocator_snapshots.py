"""Memory snapshots of programs that run on the slow implementation of the allocator, in PyTorch's form."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from etloom.timeline.memory.settings import Settings
from support.reference_allocator import EVENT_NAMES, NO_OWNER, Allocator

T0 = 1_795_235_217_000_000  # us


class SnapshotWriter:
    """Runs requests and records what PyTorch would: entries of the history, and the segments at the end.

    ``names_pools``: entries state their pool, as those of PyTorch 2.13 do.
    """

    def __init__(self, *, names_pools: bool = False, **settings: Any) -> None:
        self.names_pools = names_pools
        self.allocator = Allocator(Settings(**settings), [], [], [])
        self.history: list[dict[str, Any]] = []
        self.stacks: dict[int, list[Any]] = {}
        self._requests = 0
        self._pool_of: dict[int, tuple[int, int]] = {}

    def alloc(self, size: int, line: str = "train (train.py:1)", stream: int = 0, pool: int = 0) -> int:
        """Request bytes; return the number of the request, for `free`."""
        frames = _frames(line)
        self._requests += 1
        self.allocator.operation = self._requests
        self.stacks[self._requests] = frames
        seen = len(self.allocator.events)
        address = self.allocator.alloc(size, stream, pool)
        self._record_events(seen, frames, stream)
        if address >= 0:
            self._record("alloc", address, size, frames, stream, pool_id=(0, pool))
        return self._requests

    def free(self, request: int) -> None:
        block = self.allocator.live[request]
        stream, pool = block.segment.stream, (0, block.segment.pool[0])
        for action in ("free_requested", "free_completed"):
            self._record(action, block.address, block.requested, self.stacks[request], stream, pool_id=pool)
        self.allocator.free(request)

    def release_pool(self, pool: int) -> None:
        """Free a private pool, as when its last CUDA graph is destroyed: empty_cache() then returns its segments."""
        self.allocator.released_pools.add(pool)

    def empty_cache(self) -> None:
        seen = len(self.allocator.events)
        self._pool_of = {segment.address: (0, segment.pool[0]) for segment in self.allocator.segments}
        self.allocator.empty_cache()
        self._record_events(seen, _frames("empty_cache (torch/cuda/memory.py:170)"), 0)

    def snapshot(self) -> dict[str, Any]:
        segments = []
        for segment in sorted(self.allocator.segments, key=lambda s: s.address):
            mapped = [block for block in segment.blocks if block.mapped]
            blocks = [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "inactive" if block.owner == NO_OWNER else "active_allocated",
                    "frames": self.stacks.get(block.owner, []),
                }
                for block in mapped
            ]
            segments.append(
                {
                    "device": 0, "address": segment.address, "total_size": sum(block.size for block in mapped),
                    "stream": segment.stream, "segment_type": "small" if segment.pool[1] else "large",
                    "segment_pool_id": (0, segment.pool[0]), "is_expandable": segment.expandable, "blocks": blocks,
                }
            )  # fmt: skip
        return {
            "segments": [segment for segment in segments if segment["blocks"]],
            "device_traces": [self.history],
            "allocator_settings": {"expandable_segments": self.allocator.settings.expandable_segments},
            "external_annotations": [],
        }

    def _record_events(self, seen: int, frames: list[Any], stream: int) -> None:
        for _, kind, address, size in self.allocator.events[seen:]:
            name = EVENT_NAMES[kind]
            free = self.allocator.settings.capacity - self.allocator.reserved
            if name == "oom":
                self._record(name, 0, size, frames, stream, device_free=free)
            elif name != "retry":
                pools = {s.address: (0, s.pool[0]) for s in self.allocator.segments}
                pool = pools.get(address) or self._pool_of.get(address, (0, 0))
                self._record(name, address, size, frames, stream, pool_id=pool)

    def _record(
        self, action: str, address: int, size: int, frames: list[Any], stream: int, **more: Any
    ) -> None:
        if not self.names_pools:
            more.pop("pool_id", None)
        self.history.append(
            {
                "action": action, "addr": address, "size": size, "stream": stream, "frames": frames,
                "time_us": T0 + len(self.history), **more,
            }
        )  # fmt: skip


def write_snapshot(path: Path) -> Path:
    """Write a snapshot of two requests, of which one is freed; return its path."""
    writer = SnapshotWriter()
    writer.free(writer.alloc(1 << 20))
    writer.alloc(30 << 20)
    path.write_bytes(pickle.dumps(writer.snapshot()))
    return path


def _frames(lines: str) -> list[dict[str, Any]]:
    """Return the frames of "inner (a.py:1); outer (b.py:2)"; no lines: a thread without Python."""
    frames = [{"name": "c10::cuda::CUDACachingAllocator::malloc()", "filename": "??", "line": 0}]
    for line in lines.split("; ") if lines else ():
        name, _, place = line.partition(" (")
        file, _, number = place.rstrip(")").rpartition(":")
        frames.append({"name": name, "filename": file, "line": int(number)})
    return frames
