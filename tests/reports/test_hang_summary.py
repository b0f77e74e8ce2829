"""The summary of Flight Recorder dumps: the verdict on the hang, instead of findings that need times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.reports.html_report import render_page
from etloom.reports.summary import summarize_run

SECOND = 1_000_000_000


def write_dumps(folder: Path, calls: dict[int, list[tuple[int, str]]], first_s: dict[int, int]) -> Path:
    """Write a dump per rank of a group of all of them; a call is (sequence number, state)."""
    members = str(sorted(calls))
    for rank, numbers in calls.items():
        entries: list[dict[str, Any]] = [
            {
                "record_id": seq, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": seq,
                "p2p_seq_id": 0, "op_id": seq, "profiling_name": "nccl:all_reduce", "is_p2p": False,
                "time_created_ns": 10**18 + (first_s[rank] + seq) * SECOND, "state": state,
                "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": False,
                "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
                "timeout_ms": 600000, "frames": [],
            }
            for seq, state in numbers
        ]  # fmt: skip
        groups = {"0": {"name": "0", "desc": "default_pg", "ranks": members}}
        dump = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
    return folder


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """Rank 1 stopped; it made its last call a minute before the first one that rank 0's dump still holds."""
    waits, stopped = [(5, "completed"), (6, "scheduled")], [(4, "completed"), (5, "completed")]
    return write_dumps(tmp_path, {0: waits, 1: stopped}, {0: 60, 1: 0})


@pytest.mark.slow
def test_the_verdict_is_the_first_line(hang: Path) -> None:
    job = etloom.open(hang, use_cache=False)
    first = summarize_run(job).lines[0]
    assert (first.topic, first.figure, first.tone) == ("Hang", "rank 1: not arrived", "bad")
    assert "only rank 0 called all_reduce 6" in first.text
    page = render_page(job)
    assert first.figure in page
    assert "nothing found" not in page


def test_dumps_of_different_times_are_one_run(hang: Path) -> None:
    assert "job.no_common_time" not in etloom.open(hang, use_cache=False).stats["name"].to_list()


@pytest.mark.slow
def test_dumps_without_a_hang_are_reported_as_such(tmp_path: Path) -> None:
    done = [(5, "completed"), (6, "completed")]
    job = etloom.open(write_dumps(tmp_path, {0: done, 1: done}, {0: 0, 1: 0}), use_cache=False)
    assert summarize_run(job).lines[0].figure == "none"
