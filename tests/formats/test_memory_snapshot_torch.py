"""A snapshot as torch 2.13 writes it, key for key, of a caching allocator in Python; torch's own tools read it too.

There is no device where the tests run, so the allocator is made here: segments of 2 and 20 MiB that are split into
blocks, sizes rounded up to 512 B, blocks that another stream still uses after they were freed, segments that grow, an
allocation that fails, and a history that keeps its last entries only.
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.formats import detect_format, memory_snapshot

T0 = 1_795_235_217_000_000  # us
MIB = 1 << 20
LINES = [
    ("forward", "/home/me/model.py", 12),
    ("backward", "/home/me/train.py", 30),
    ("step", "/home/me/train.py", 31),
]


def frames(name: str, filename: str, line: int) -> list[dict[str, Any]]:
    """C++ frames, torch's Python, the user's line and its caller, as stacks="all" records them."""
    inner = {
        "name": "c10::cuda::CUDACachingAllocator::Native::malloc(void**, long, CUstream_st*)",
        "filename": "??",
        "line": 0,
    }
    linear = {
        "name": "linear",
        "filename": "/usr/lib/python3/site-packages/torch/nn/functional.py",
        "line": 99,
    }
    return [
        inner,
        linear,
        {"name": name, "filename": filename, "line": line},
        {"name": "<module>", "filename": "/home/me/train.py", "line": 3},
    ]


STACKS = [frames(*line) for line in LINES]


@dataclass
class Caching:
    """The caching allocator of one device."""

    device: int
    most: int
    clock: int = T0
    history: list[dict[str, Any]] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    totals: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # us, allocated and reserved after each change

    def record(self, action: str, addr: int, size: int, stream: int, stack: list[Any]) -> None:
        self.clock += 3
        where = {"device_free": addr} if action == "oom" else {"addr": addr}
        said = {
            "size": size,
            "stream": stream,
            "time_us": self.clock,
            "compile_context": "N/A",
            "user_metadata": "",
        }
        self.history.append({"action": action, **where, **said, "pool_id": (0, 0), "frames": stack})
        if action in ("alloc", "free_requested"):
            self.totals.append((self.clock, self.in_use(), self.reserved()))

    def blocks(self) -> list[dict[str, Any]]:
        return [block for segment in self.segments for block in segment["blocks"]]

    def in_use(self) -> int:
        return sum(b["requested_size"] for b in self.blocks() if b["state"] == "active_allocated")

    def reserved(self) -> int:
        return sum(segment["total_size"] for segment in self.segments)

    def alloc(self, size: int, stream: int, stack: list[Any]) -> int:
        rounded = max(512, -(-size // 512) * 512)
        block = next(
            (
                b
                for s in self.segments
                if s["stream"] == stream
                for b in s["blocks"]
                if b["state"] == "inactive" and b["size"] >= rounded
            ),
            None,
        )
        if block is None:
            total = 2 * MIB if rounded <= MIB else max(20 * MIB, -(-rounded // (2 * MIB)) * 2 * MIB)
            address = 0x7F00_0000_0000 + self.device * (1 << 36) + len(self.history) * (1 << 26)
            block = {
                "address": address,
                "size": total,
                "requested_size": 0,
                "state": "inactive",
                "frames": [],
            }
            segment = {
                "device": self.device, "address": address, "total_size": total, "stream": stream,
                "segment_type": "small" if rounded <= MIB else "large", "segment_pool_id": (0, 0),
                "is_expandable": False, "registration_counter": -1, "frames": stack, "blocks": [block],
            }  # fmt: skip
            self.segments.append(segment)
            self.record("segment_alloc", address, total, stream, stack)
        owner = next(s for s in self.segments if any(b is block for b in s["blocks"]))
        if block["size"] > rounded:
            rest = {**block, "address": block["address"] + rounded, "size": block["size"] - rounded}
            owner["blocks"].insert(next(i for i, b in enumerate(owner["blocks"]) if b is block) + 1, rest)
        block.update(size=rounded, requested_size=size, state="active_allocated", frames=stack)
        self.record("alloc", block["address"], size, stream, stack)
        return int(block["address"])

    def free(self, address: int, other_stream: bool) -> None:
        block = next(b for b in self.blocks() if b["address"] == address)
        block["state"] = "active_pending_free"
        self.record("free_requested", address, block["requested_size"], 0, STACKS[1])
        if not other_stream:
            self.complete(block)

    def complete(self, block: dict[str, Any]) -> None:
        block["state"] = "inactive"
        self.record("free_completed", block["address"], block["requested_size"], 0, STACKS[1])
        block["requested_size"] = 0

    def settle(self) -> None:
        """What other streams used is free; segments that hold nothing go back to the driver."""
        for block in self.blocks():
            if block["state"] == "active_pending_free":
                self.complete(block)
        for segment in [s for s in self.segments if all(b["state"] == "inactive" for b in s["blocks"])]:
            self.segments.remove(segment)
            self.record("segment_free", segment["address"], segment["total_size"], segment["stream"], [])


def run(device: int, most: int, seed: int) -> Caching:
    draw = random.Random(seed)
    caching = Caching(device, most)
    live: list[int] = []
    for at in range(400):
        if live and draw.random() < 0.45:
            caching.free(live.pop(draw.randrange(len(live))), other_stream=draw.random() < 0.2)
        else:
            size = draw.choice([4, 100, 513, 70_000, 3 * MIB + 7, 31 * MIB])
            live.append(caching.alloc(size, draw.choice([0, 0, 0, 0x55AA]), draw.choice(STACKS)))
        if at % 60 == 59:
            caching.settle()
    caching.record("oom", 12345, 1 << 40, 0, STACKS[0])
    return caching


def snapshot(*devices: Caching, skipped: tuple[str, ...] = ()) -> dict[str, Any]:
    """torch.cuda.memory._snapshot(): each device's history holds its last entries."""
    for one in devices:
        for segment in one.segments:
            sizes = {
                state: sum(b["size"] for b in segment["blocks"] if b["state"].startswith(state))
                for state in ("active", "active_allocated")
            }
            asked = sum(b["requested_size"] for b in segment["blocks"] if b["state"] == "active_allocated")
            segment.update(
                allocated_size=sizes["active_allocated"], active_size=sizes["active"], requested_size=asked
            )
    return {
        "segments": [segment for one in devices for segment in one.segments],
        "device_traces": [[e for e in one.history if e["action"] not in skipped][-one.most :] for one in devices],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
            "expandable_segments": False, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {"1": 0, "2": 0, "65536": 0},
        },
        "external_annotations": [
            {"name": "ProfilerStep#1", "stage": "START", "device": 0, "time_us": T0 + 100},
            {"name": "forward", "stage": "START", "device": 0, "time_us": T0 + 110},
            {"name": "forward", "stage": "END", "device": 0, "time_us": T0 + 400},
            {"name": "ProfilerStep#1", "stage": "END", "device": 0, "time_us": T0 + 900},
            {"name": "left open", "stage": "START", "device": 0, "time_us": T0 + 950},
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def devices() -> list[Caching]:
    return [run(0, 10**6, 1), run(1, 300, 2)]


@pytest.mark.parametrize("protocol", [2, 4, 5, "json"])
@pytest.mark.parametrize("packed", [False, True])
def test_totals_are_the_allocator_s(
    devices: list[Caching], tmp_path: Path, protocol: Any, packed: bool
) -> None:
    made = snapshot(*devices)
    data = json.dumps(made).encode() if protocol == "json" else pickle.dumps(made, protocol)
    path = tmp_path / ("rank3_snapshot." + ("json" if protocol == "json" else "pickle") + ".gz" * packed)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert detect_format(path) == "memory-snapshot"
    trace = memory_snapshot.read(path)
    assert dict(trace.stats.select("name", "count").rows()) == {"read.unpaired_annotation": 1}
    for one in devices:
        rows = trace.memory.filter(pl.col("device") == one.device).select(
            pl.col("ts") // 1000, "total_allocated", "total_reserved"
        )
        assert 0 < rows.height <= len(one.totals)
        assert rows.rows() == one.totals[-rows.height :]
    assert trace.memory.filter(pl.col("device") == 0).height == len(devices[0].totals)
    assert trace.memory.filter(pl.col("device") == 1).height < len(devices[1].totals), "the history forgets"
    kinds = trace.events["name"].cast(pl.String).value_counts()
    assert dict(kinds.rows())["oom"] == 2
    assert "alloc" not in kinds["name"] and "free_requested" not in kinds["name"]


def test_peaks_of_the_run_and_of_an_annotated_step(devices: list[Caching], tmp_path: Path) -> None:
    (tmp_path / "rank3_snapshot.pickle").write_bytes(pickle.dumps(snapshot(*devices)))
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [3]
    rows = {
        (row["device"], row["step"]): row for row in etloom.analyze(job, "memory-timeline").rows(named=True)
    }
    assert set(rows) == {(0, 1), (0, None), (1, 1), (1, None)}
    whole = rows[0, None]
    top = max(devices[0].totals, key=lambda total: total[1])
    assert (whole["peak_bytes"], whole["peak_at_ns"], whole["unknown_bytes"]) == (top[1], top[0] * 1000, 0)
    assert whole["peak_reserved_bytes"] == max(total[2] for total in devices[0].totals)
    assert whole["operator"] in {f"{name} ({file}:{line})" for name, file, line in LINES}
    during = [total[1] for total in devices[0].totals if T0 + 100 <= total[0] < T0 + 900]
    before = [total[1] for total in devices[0].totals if total[0] < T0 + 100][-1]
    assert rows[0, 1]["peak_bytes"] == max(before, *during)
    marks = etloom.analyze(job, "annotations")
    assert marks.select("name", "total_ns").sort("name").rows() == [
        ("ProfilerStep#1", 800_000),
        ("forward", 290_000),
    ]


def test_without_requests_memory_is_free_when_the_free_completes(
    devices: list[Caching], tmp_path: Path
) -> None:
    """_record_memory_history(skip_actions=["free_requested"])."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(devices[0], skipped=("free_requested",))))
    memory = memory_snapshot.read(path).memory
    history = devices[0].history
    total, expected = 0, []
    for entry in history:
        change = {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"])
        if change is not None:
            total += change
            expected.append((entry["time_us"], change, total))
    assert memory.select(pl.col("ts") // 1000, "bytes", "total_allocated").rows() == expected


@pytest.mark.slow
@pytest.mark.torch
def test_tools_of_torch_read_the_snapshot(devices: list[Caching]) -> None:
    from torch.cuda import _memory_viz

    made = snapshot(*devices)
    history = _memory_viz.trace(made)
    assert history.count("raise OutOfMemoryError") == 2 and "Device 1" in history
    large = sum(segment["segment_type"] == "large" for segment in made["segments"])
    assert _memory_viz.segsum(made).count("MiB allocated, ") == large
    assert "snapshot.pickle" in _memory_viz.trace_plot(made)
