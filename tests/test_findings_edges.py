"""What patterns say of odd and of ambiguous cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_rank import Run, found, told

import etloom
from etloom import registry
from etloom.patterns import Views

BACK = "Memcpy DtoH (Device -> Pageable)"
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
PINNED = "Memcpy HtoD (Pinned -> Device)"


def test_results_copied_back_to_pageable_memory_are_exposed(tmp_path: Path) -> None:
    run = Run()
    for at in (0, 100, 200):
        run.op("aten::mm", at, 5).kernel(at + 1, at + 5, 45)
        run.op("aten::to", at + 10, 90).kernel(at + 11, at + 50, 50, BACK, "gpu_memcpy", call_us=88)
    (row,) = told(run.trace(tmp_path), "exposed-copies")
    assert (row["cost_ns"], row["count"], row["operator"]) == (150_000, 3, "aten::to")
    assert "copy back less" in row["advice"]
    assert found(run.trace(tmp_path), "host-copies") == []


def test_two_findings_of_one_place_are_two(tmp_path: Path) -> None:
    run = Run().op("my::load", 0, 1_000).kernel(1, 5, 90, PAGEABLE, "gpu_memcpy", call_us=100)
    for at in range(20):
        run.kernel(110 + 10 * at, 112 + 10 * at, 4, PINNED, "gpu_memcpy", bytes=1000)
    rows = told(run.trace(tmp_path), "host-copies")
    assert [(row["title"], row["cost_ns"], row["operator"]) for row in rows] == [
        ("the host waits in 1 copy from pageable memory to the device in my::load", 100_000, "my::load"),
        ("20 copies of less than 64 KiB to the device in my::load", 80_000, "my::load"),
    ]


@pytest.mark.parametrize(
    "run", ["dlrm", "nsys/h100_2gpu_1s.sqlite.gz", "hta_misc/negative_queue_a100.json.gz"]
)
def test_a_pattern_names_a_place_of_a_rank_once(data: Path, run: str) -> None:
    """Findings of one pattern and place on several ranks are told as one, so on one rank there may not be two."""
    views = Views(etloom.open(data / run))
    for name in registry.names("patterns"):
        pattern = registry.get("patterns", name)
        if pattern.SCOPE == "rank":
            for view in views.values():
                seen = [finding.place for finding in pattern.find(view)]
                assert len(seen) == len(set(seen)), name
