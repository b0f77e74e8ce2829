"""Exported memory snapshots: read again they are the simulated program, and torch's own tools read them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import etloom
from etloom.timeline.memory.program import find_programs
from support.allocator_snapshots import SnapshotWriter

MIB = 1 << 20


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "capacity=150MiB"])
def test_an_exported_snapshot_is_the_simulated_program(tmp_path: Path, settings: str) -> None:
    writer = SnapshotWriter()
    kept = [writer.alloc(size * MIB, f"forward (model.py:{size})") for size in (1, 3, 30, 12, 60)]
    for request in kept[::2]:
        writer.free(request)
    writer.alloc(70 * MIB, "step (optim.py:1)")
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(writer.snapshot()))
    job = etloom.open(tmp_path / "a.pickle", use_cache=False)
    etloom.export(job, tmp_path / "b.pickle", settings=settings)
    exported = etloom.open(tmp_path / "b.pickle", use_cache=False)
    (expected,) = etloom.simulate_memory(job, *([settings] if settings else [])).tail(1).rows(named=True)
    recorded = etloom.simulate_memory(exported).row(0, named=True)
    for name in ("peak_reserved_bytes", "peak_allocated_bytes"):
        assert recorded[name] == expected[name]
    (program,) = find_programs(exported[0])
    assert program.reserved_before == 0 and len(program.blocks.address) == 0
    holders = etloom.analyze(exported, "memory-holders", at="end")
    assert holders["place"].to_list() == etloom.analyze(job, "memory-holders", at="end")["place"].to_list()
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    content = pickle.loads((tmp_path / "b.pickle").read_bytes())
    assert "b.pickle" in viewer.trace_plot(content) or viewer.segsum(content)
