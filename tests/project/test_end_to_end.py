"""The whole way on traces recorded for this project: no other data is needed."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core import registry
from etloom.core.errors import AnalysisError


@pytest.mark.slow
def test_two_ranks_from_files_to_report(own: Path, tmp_path: Path) -> None:
    job = etloom.open(own / "ddp_2", use_cache=False)
    assert job.ranks == [0, 1]
    assert job.meta["run"]["world_size"] == 2
    assert [trace.meta["world_size"] for trace in job.values()] == [2, 2]
    assert not job.stats.filter(pl.col("severity") != "info").height

    for trace in job.values():
        linked = trace.meta["link"]
        assert (linked["host_operators"], linked["linked"], linked["coverage"]) == (377, 377, 1.0)
        assert trace.events.height == trace.nodes.height == 380

    steps = etloom.analyze(job, "steps")
    assert steps.select("rank", "step").rows() == [(0, 1), (0, 2), (1, 1), (1, 2)]
    timed = {(rank, step): ms for rank, step, ms in json.loads((own / "ddp_2/steps.json").read_text())}
    # The script's last recorded step also holds the closing of the window.
    for rank, step, dur in steps.select("rank", "step", "dur_ns").rows():
        assert step == 2 or abs(dur / 1e6 / timed[rank, step] - 1) < 0.02

    calls = job.query(
        "select rank, collective, bytes, group_size from comms where node is not null order by rank, node"
    )
    assert calls.filter(pl.col("rank") == 0)["collective"].to_list() == ["broadcast"] * 2 + ["all_reduce"] * 2
    parameters = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    assert calls.filter(pl.col("collective") == "all_reduce")["bytes"].unique().to_list() == [parameters]

    page = etloom.report(job, tmp_path / "report.html").read_text()
    assert page.count('<script type="text/plain" data-rank=') == 2
    assert page.startswith("<!doctype html>")


@pytest.mark.slow
def test_every_analysis_answers(own: Path) -> None:
    job = etloom.open(own / "ddp_2", use_cache=False)
    asks_for_more = []
    for name in registry.list_plugins("analyses"):
        try:
            table = etloom.analyze(job, name)
        except AnalysisError as error:
            assert error.remedy, name
            asks_for_more.append(name)
        else:
            assert table.width > 1, name
    # A run on the host alone has no launches, and no trace of this sort a dump or modules.
    assert not {"steps", "top-ops", "collectives", "stragglers", "critical-path", "findings"} & set(
        asks_for_more
    )
