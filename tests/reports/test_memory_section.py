"""The data of the memory section: exact sizes at each moment, the maxima of long histories, and a small page."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import etloom
from etloom.analyses import memory_holders
from etloom.analyses.helpers.memory_curves import measure_curves
from etloom.core.trace import Job
from etloom.reports import html_report
from etloom.reports.memory_section import render_memory
from etloom.reports.summary import summarize_run
from etloom.timeline.memory.program import find_programs
from support.allocator_snapshots import SnapshotWriter

SNAPSHOTS = ("gpt2700m_ctx128_full_step", "small_finetune")


def read_data(html: str) -> list[dict[str, Any]]:
    match = re.search(r'id="memory-data">([^<]*)<', html)
    assert match is not None
    data: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return data


def write_random(path: Path, count: int, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    writer = SnapshotWriter()
    live: list[int] = []
    for _ in range(count):
        if live and rng.random() < 0.48:
            writer.free(live.pop(int(rng.integers(len(live)))))
        else:
            line = f"forward (model.py:{rng.integers(20)})"
            live.append(writer.alloc(int(rng.integers(1, 4 << 20)), line))
    path.write_bytes(pickle.dumps(writer.snapshot()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_holders_sum_to_the_memory_in_use(data: Path, name: str) -> None:
    trace = etloom.open(data / "memory" / f"{name}.pickle.gz", use_cache=False)[0]
    (curve,) = measure_curves(trace)
    (program,) = find_programs(trace)
    simulation = program.run()
    assert curve.holder_bytes.sum(axis=0).tolist() == curve.allocated.tolist()
    assert (curve.holder_bytes >= 0).all() and (curve.holder_blocks >= 0).all()
    assert 100 < len(curve.operations) < 1000
    for size in ("reserved", "allocated", "requested"):
        assert getattr(curve, size).max() == getattr(simulation, size).max()
    peak = int(curve.allocated.argmax())
    by_line = curve.holders.with_columns(bytes=pl.Series(curve.holder_bytes[:, peak])).group_by("line")
    expected = memory_holders.analyze(trace, top=5)
    sums = dict(by_line.agg(pl.col("bytes").sum()).iter_rows())
    assert [sums[place] for place in expected["place"]] == expected["bytes"].to_list()


def test_each_part_of_a_long_history_keeps_its_maxima(tmp_path: Path) -> None:
    trace = etloom.open(write_random(tmp_path / "a.pickle", 3000), use_cache=False)[0]
    (curve,) = measure_curves(trace)
    (program,) = find_programs(trace)
    simulation = program.run()
    chosen = set(curve.operations.tolist())
    for part in np.array_split(np.arange(len(program.action)), 40):
        inside = [operation for operation in part.tolist() if operation in chosen]
        for sizes in (simulation.reserved, simulation.allocated, simulation.requested):
            assert sizes[inside].max() == sizes[part].max()
    assert not curve.is_exact


def test_data_of_a_short_history(tmp_path: Path) -> None:
    writer = SnapshotWriter()
    first = writer.alloc(30 << 20, "forward (a.py:1)")
    writer.alloc(10 << 20, "forward (b.py:2)")
    writer.free(first)
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(writer.snapshot()))
    job = etloom.open(tmp_path / "a.pickle", use_cache=False)
    (data,) = read_data(render_memory(job, {}))
    assert data["exact"] and not data["linked"] and data["peak"] == 1
    assert [size >> 20 for size in data["allocated"]] == [30, 40, 10]
    assert data["held"][1] == [[0, 30 << 20, 1], [1, 10 << 20, 1]] and data["held"][2] == [[1, 10 << 20, 1]]
    assert [holder[1] for holder in data["holders"]] == ["forward (a.py:1)", "forward (b.py:2)"]
    parts = dict(zip(data["groups"], data["parts"], strict=True))
    assert parts == {"forward (a.py:1)": [30 << 20, 30 << 20, 0], "forward (b.py:2)": [0, 10 << 20, 10 << 20]}


@pytest.mark.slow
def test_the_summary_of_a_snapshot_is_about_memory(data: Path) -> None:
    job = etloom.open(data / "memory" / "gpt2700m_ctx128_full_step.pickle.gz", use_cache=False)
    lines = {line.topic: line for line in summarize_run(job).lines}
    assert lines["Reserved"].figure == "61.11 GB" and "cached segments" in lines["Top finding"].text
    assert "Critical path" not in lines and "12,665 requests and frees" in lines["Read"].text


@pytest.mark.slow
def test_a_snapshot_adds_little_to_the_page(tmp_path: Path) -> None:
    job = etloom.open(write_random(tmp_path / "a.pickle", 3000), use_cache=False)
    page = html_report.render_page(job)
    assert len(render_memory(job, {})) < 150_000
    assert "unknown" not in page.partition("<footer>")[0].partition("<main>")[2]


def test_text_of_a_snapshot_is_escaped(tmp_path: Path) -> None:
    writer = SnapshotWriter()
    writer.alloc(30 << 20, "<script>alert(1)</script> (a.py:1)")
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(writer.snapshot()))
    job: Job = etloom.open(tmp_path / "a.pickle", use_cache=False)
    page = html_report.render_page(job)
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_a_history_that_does_not_match_is_a_note(tmp_path: Path) -> None:
    writer = SnapshotWriter()
    writer.alloc(30 << 20)
    content = writer.snapshot()
    outside = {"addr": 1 << 45, "size": 512, "stream": 0, "frames": [], "time_us": 1}
    content["device_traces"][0] = [{"action": "free_completed", **outside}, *content["device_traces"][0]]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    job = etloom.open(tmp_path / "a.pickle", use_cache=False)
    assert "rank 0: the history of the allocator does not match the segments" in html_report.render_page(job)
