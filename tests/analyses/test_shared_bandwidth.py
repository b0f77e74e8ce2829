"""Bandwidth over the union of communication time."""

from __future__ import annotations

from pathlib import Path

import pytest

import etloom
from support.small_traces import RankBuilder


def test_concurrent_communications_count_their_time_once(tmp_path: Path) -> None:
    """All-reduces of 4 MB on 2 ranks (bus factor 1), from 100 to 300, 200 to 400 and 500 to 600 us."""
    run = RankBuilder()
    for seq, (start, dur) in enumerate([(100, 200), (200, 200), (500, 100)]):
        run.op("aten::add", start - 20, 15).all_reduce(start - 10, start, dur, seq, 1_000_000)
    (row,) = etloom.analyze(run.trace(tmp_path), "shared-bandwidth").to_dicts()
    row.pop("rank", None)
    assert row == {
        "communications": 3,
        "sized": 3,
        "bus_bytes": 12_000_000,
        "busy_ns": 400_000,
        "shared_gb_per_s": pytest.approx(30.0),
    }


def test_a_run_without_communication_has_no_bandwidth(tmp_path: Path) -> None:
    (row,) = etloom.analyze(
        RankBuilder().op("aten::mm", 0, 10).trace(tmp_path), "shared-bandwidth"
    ).to_dicts()
    assert row["communications"] == 0 and row["shared_gb_per_s"] is None
