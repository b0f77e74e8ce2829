"""Programs of recorded snapshots: the simulation repeats what was recorded, to the byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from etloom.core.errors import AnalysisError
from etloom.formats import memory_snapshot
from etloom.timeline.memory.program import _MOST_MAPPED, ALLOC, _find_mapped, find_programs

SNAPSHOTS = {
    "gpt2700m_ctx128_forward": 19_667_091_456,
    "gpt2700m_ctx128_full_step": 61_111_009_280,
    "gpt2700m_ctx256_forward_bf16": 28_848_422_912,
    "medium_256_training": 9_265_217_536,
    "small_finetune": 6_471_811_072,
}
"""Name -> reserved peak in bytes."""


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_simulation_repeats_a_recorded_snapshot(data: Path, name: str) -> None:
    trace = memory_snapshot.read(data / "memory" / f"{name}.pickle.gz")
    (program,) = find_programs(trace)
    simulation = program.run()
    recorded = trace.allocator.with_columns(pl.col("action").cast(pl.String), pl.col("addr").cast(pl.Int64))
    addresses = recorded["addr"].to_numpy()[program.entry]
    requests = program.action == ALLOC
    assert np.array_equal(simulation.address[requests], addresses[requests])
    columns = pl.col("addr"), pl.col("bytes")
    taken = recorded.filter(pl.col("action").is_in(["segment_alloc", "segment_free"]))
    assert taken.select("action", *columns).rows() == simulation.events.select("kind", *columns).rows()
    assert max(program.reserved_before, int(simulation.reserved.max())) == SNAPSHOTS[name]
    assert program.describe_doubt() is None
    blocks = recorded.filter(pl.col("action") == "block").sort("addr")
    assert blocks.select("addr", "rounded").rows() == simulation.blocks.select(columns).rows()


def test_negative_sizes_do_not_hide_how_much_is_mapped() -> None:
    facts = {"action": "segment_map", "addr": 0, "stream": 0, "pool": None, "kind": None}
    history = pl.DataFrame([{**facts, "bytes": size} for size in (_MOST_MAPPED, -_MOST_MAPPED)])
    with pytest.raises(AnalysisError, match="does not match the segments"):
        list(_find_mapped(history, history.clear()))
