"""PyTorch's memory snapshots: a small one by hand, random ones of a simulated allocator, and hostile ones."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom import _native
from etloom.cli import app
from etloom.core.errors import AnalysisError, LimitError, ReadError
from etloom.formats import detect_format, memory_snapshot
from support.examples import examples

T0 = 1_795_235_217_000_000  # us
LAYER = [
    {"name": "gather", "filename": "/src/memory_common.cpp", "line": 7},
    {"name": "linear", "filename": "/site-packages/torch/nn/functional.py", "line": 99},
    {"name": "forward", "filename": "/home/me/model.py", "line": 12},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 3},
]
LOAD = [{"name": "load", "filename": "/home/me/data.py", "line": 5}]


def entry(
    action: str, us: int, size: int, addr: int = 0, frames: list[Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": 0,
        "time_us": T0 + us,
        "frames": frames or [],
        **more,
    }


def snapshot() -> dict[str, Any]:
    """Device 1 alone. 900 B from before (of which 100 are freed), then 1000 and 300 B, 1000 freed, 50 B at the end."""
    history = [
        entry("segment_alloc", 5, 2 << 20, 0x2000_0000),
        entry("alloc", 10, 1000, 0x1000, LAYER),
        entry("free_requested", 20, 100, 0x500),
        entry("free_completed", 21, 100, 0x500),
        entry("alloc", 30, 300, 0x2000, LOAD),
        entry("free_requested", 40, 1000, 0x1000, LAYER),
        entry("free_completed", 45, 1000, 0x1000, LAYER),
        entry("alloc", 50, 50, 0x1000, LOAD),
        {
            "action": "oom",
            "size": 1 << 40,
            "stream": 0,
            "time_us": T0 + 60,
            "device_free": 4096,
            "frames": LOAD,
        },
        entry("snapshot", 70, 0),
    ]
    blocks = [
        {"size": 1024, "requested_size": 800, "address": 0x3000, "state": "active_allocated", "frames": []},
        {"size": 512, "requested_size": 50, "address": 0x1000, "state": "active_allocated", "frames": LOAD},
        {"size": 512, "requested_size": 300, "address": 0x2000, "state": "active_allocated", "frames": LOAD},
        {"size": 512, "requested_size": 100, "address": 0x500, "state": "inactive", "frames": []},
    ]
    segment = {"device": 1, "address": 0x500, "total_size": 20 << 20, "stream": 0, "segment_type": "large"}
    return {
        "segments": [
            segment | {"segment_pool_id": (0, 0), "blocks": blocks[:2]},
            segment | {"blocks": blocks[2:]},
        ],
        "device_traces": [[], history],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }


def write(path: Path, what: Any) -> Path:
    path.write_bytes(pickle.dumps(what) if path.suffix == ".pickle" else json.dumps(what).encode())
    return path


@pytest.mark.parametrize("name", ["snapshot.pickle", "rank1_snapshot.json"])
def test_a_small_snapshot(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, snapshot())
    assert detect_format(path) == "memory-snapshot"
    trace = memory_snapshot.read(path)
    memory = trace.memory.with_columns(us=pl.col("ts") // 1000 - T0)
    reserved = 40 << 20
    assert memory.select("us", "addr", "bytes", "total_allocated", "total_reserved", "device").rows() == [
        (10, 0x1000, 1000, 1900, reserved, 1),
        (20, 0x500, -100, 1800, reserved, 1),
        (30, 0x2000, 300, 2100, reserved, 1),
        (40, 0x1000, -1000, 1100, reserved, 1),
        (50, 0x1000, 50, 1150, reserved, 1),
    ]
    assert json.loads(memory["stack"][2]) == ["load (/home/me/data.py:5)"]
    assert trace.events.select(pl.col("name").cast(pl.String)).to_series().to_list() == [
        *("segment_alloc", "oom", "snapshot")
    ]
    allocator = trace.allocator.with_columns(pl.col("action").cast(pl.String))
    assert allocator["action"].to_list()[2:4] == ["free_requested", "free_completed"]
    assert allocator.filter(pl.col("action") == "block").select("addr", "bytes", "rounded").rows() == [
        (0x3000, 800, 1024), (0x1000, 50, 512), (0x2000, 300, 512), (0x500, 100, 512),
    ]  # fmt: skip
    assert json.loads(trace.events["args"][1]) == {"bytes": 1 << 40, "device_free": 4096}
    assert trace.meta["clock"] == "epoch" and trace.stats.is_empty()


def test_memory_timeline_names_the_line_with_the_most_memory(tmp_path: Path) -> None:
    job = etloom.open(write(tmp_path / "snapshot.pickle", snapshot()), use_cache=False)
    (row,) = etloom.analyze(job, "memory-timeline").rows(named=True)
    # At 30 us: 1000 B of the layer, 300 B of the data, 800 B from before the history.
    assert row["peak_bytes"] == 2100 and row["peak_at_ns"] == (T0 + 30) * 1000
    assert (row["operator"], row["operator_bytes"]) == ("forward (/home/me/model.py:12)", 1000)
    assert row["unknown_bytes"] == 800 and row["allocations"] == 3 and row["device"] == 1
    assert row["peak_reserved_bytes"] == 40 << 20
    # Blocks: 1024 B for the layer, 512 B for the data, 1024 B from before; the first entry is a segment at 5 us.
    assert (row["peak_rounded_bytes"], row["peak_after_ns"]) == (2560, 25_000)


def test_without_times_the_peak_follows_from_the_order(tmp_path: Path) -> None:
    content = snapshot()
    for item in content["device_traces"][1]:
        del item["time_us"]
    job = etloom.open(write(tmp_path / "snapshot.pickle", content), use_cache=False)
    (row,) = etloom.analyze(job, "memory-timeline").rows(named=True)
    assert (row["peak_bytes"], row["peak_rounded_bytes"], row["peak_at_ns"]) == (2100, 2560, None)
    assert row["operator"] == "forward (/home/me/model.py:12)"


def test_snapshots_of_several_ranks_are_a_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}_snapshot.pickle", snapshot())
    done = CliRunner().invoke(
        app, ["analyze", "memory-timeline", str(tmp_path), "--format", "csv", "--no-cache"]
    )
    assert done.exit_code == 0, done.output
    assert [line.split(",")[0] for line in done.output.splitlines()[1:]] == ["0", "1"]
    assert CliRunner().invoke(app, ["info", str(tmp_path), "--no-cache"]).exit_code == 0


def test_damaged_and_outdated_entries_are_counted(tmp_path: Path) -> None:
    whole = snapshot()
    whole["device_traces"][1] += [
        "text", {"action": "alloc"}, {"action": "alloc", "size": -1, "addr": 0}, {"action": "dance", "size": 1},
        {"action": "free_requested", "addr": 1, "size": 10_000},
    ]  # fmt: skip
    trace = memory_snapshot.read(write(tmp_path / "snapshot.json", whole))
    counts = dict(trace.stats.select("name", "count").rows())
    assert counts == {"read.damaged_entry": 3, "read.unknown_action": 1, "read.without_time": 1}
    # The freed 10,000 B were there before: the totals go up by them.
    assert trace.memory.drop_nulls("ts")["total_allocated"].to_list() == [11900, 11800, 12100, 11100, 11150]
    # With no blocks left, 350 B that were allocated and never freed do not fit.
    whole["segments"] = []
    trace = memory_snapshot.read(
        write(tmp_path / "snapshot.json", whole | {"device_traces": [snapshot()["device_traces"][1]]})
    )
    assert dict(trace.stats.select("name", "count").rows()) == {"read.totals_unknown": 12}
    assert trace.memory["total_allocated"].null_count() == 5
    with pytest.raises(AnalysisError, match="no allocations"):
        etloom.analyze(etloom.link(trace), "memory-timeline")


class Runs:
    """What a hostile pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("stolen",)


def test_a_snapshot_runs_nothing_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReadError, match="more than plain values"):
        memory_snapshot.read(write(tmp_path / "x.pickle", snapshot() | {"device_traces": [[Runs()]]}))
    assert not Path("stolen").exists()
    shared = [entry("alloc", 1, 1)] * 2000
    with pytest.raises(LimitError, match="same lists of entries many times"):
        memory_snapshot.read(write(tmp_path / "x.pickle", snapshot() | {"device_traces": [shared] * 2000}))
    with pytest.raises(ReadError, match="no device_traces"):
        memory_snapshot.read(write(tmp_path / "x.json", {"segments": []}))
    with pytest.raises(ReadError, match="not valid JSON"):
        memory_snapshot.read(write(tmp_path / "x.json", "") and _cut(tmp_path / "x.json"))


def _cut(path: Path) -> Path:
    path.write_bytes(json.dumps(snapshot()).encode()[:300])
    return path


@given(st.data())
@settings(max_examples=examples(30))
def test_totals_are_those_of_the_allocator(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """An allocator that keeps only the last entries of its history, as PyTorch's does."""
    live: dict[int, int] = {}
    segments: dict[int, int] = {}
    history, expected = [], []
    for at in range(data.draw(st.integers(0, 30))):
        act = data.draw(st.sampled_from(["alloc", "free_requested", "segment_alloc", "segment_free"]))
        held = live if act in ("alloc", "free_requested") else segments
        if act in ("alloc", "segment_alloc"):
            addr, size = at, data.draw(st.integers(0, 1 << 40))
            held[addr] = size
        elif held:
            addr = data.draw(st.sampled_from(sorted(held)))
            size = held.pop(addr)
        else:
            continue
        history.append(entry(act, at, size, addr))
        if held is live:
            change = size if act == "alloc" else -size
            expected.append((at, change, sum(live.values()), sum(segments.values())))
    kept = data.draw(st.integers(0, len(history)))
    history = history[len(history) - kept :]
    first = history[0]["time_us"] - T0 if history else 1 << 40
    blocks = [
        {"size": size + 511, "requested_size": size, "state": "active_allocated"} for size in live.values()
    ]
    found = [{"device": 0, "total_size": size, "blocks": []} for size in segments.values()]
    whole = {
        "segments": [*found, {"device": 0, "total_size": 0, "blocks": blocks}],
        "device_traces": [history],
    }
    path = write(tmp_path_factory.mktemp("made") / "snapshot.pickle", whole)
    memory = memory_snapshot.read(path).memory.with_columns(us=pl.col("ts") // 1000 - T0)
    rows = memory.select("us", "bytes", "total_allocated", "total_reserved").rows()
    assert rows == [row for row in expected if row[0] >= first]


def test_damaged_pickles_are_read_or_refused(tmp_path: Path) -> None:
    random = Random(1)
    seeds = [pickle.dumps(snapshot(), protocol) for protocol in (2, 4, 5)]
    for number in range(examples(400)):
        data = bytearray(random.choice(seeds))
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(data))
            data[at : at + random.choice((0, 0, 1, 9))] = random.randbytes(random.choice((0, 1, 1, 4)))
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(data)
        with contextlib.suppress(ReadError, LimitError):
            memory_snapshot.read(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_is_read_alike_in_pieces_of_any_size(protocol: int) -> None:
    data = pickle.dumps(snapshot(), protocol)

    def parse(size: int) -> dict[str, Any]:
        parser = _native.SnapshotParser()
        for at in range(0, len(data), size):
            parser.feed(data[at : at + size])
        content = parser.finish()
        return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in content.items()}

    whole = parse(len(data))
    assert whole["time"][0] == T0 + 5 and whole["rest"]["allocator_settings"] == {
        "expandable_segments": False
    }
    assert parse(1) == parse(7) == whole
