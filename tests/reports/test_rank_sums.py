"""Sums of operators and kernels over the ranks, and the charts of steps and of many ranks."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.trace import Job
from etloom.reports import html_report
from etloom.reports.html_charts import render_columns
from etloom.reports.summary import sum_over_ranks
from etloom.reports.timeline_selection import pack_timelines
from support.real_runs import open_run


def test_a_sum_names_the_rank_with_the_largest_time() -> None:
    table = pl.DataFrame(
        {
            "rank": [0, 0, 1, 2],
            "name": ["a", "b", "a", "a"],
            "count": [1, 2, 3, 4],
            "total_ns": [10, 5, 70, 20],
        }
    )
    assert sum_over_ranks(table, "total_ns").to_dicts() == [
        {"name": "a", "total_ns": 100, "pct": pytest.approx(95.238, abs=1e-3), "count": 8, "ranks": 3,
         "max_ns": 70, "max_rank": 1},
        {"name": "b", "total_ns": 5, "pct": pytest.approx(4.762, abs=1e-3), "count": 2, "ranks": 1,
         "max_ns": 5, "max_rank": 0},
    ]  # fmt: skip


@pytest.mark.slow
def test_the_page_sums_over_all_operators_of_all_ranks(data: Path) -> None:
    job = open_run(data / "dlrm")
    page = html_report.render_page(job)
    row = re.findall(r'<table id="top-ops-sum".*?<tbody><tr>(.*?)</tr>', page, re.DOTALL)[0]
    values = re.findall(r'data-value="([^"]*)"', row)
    operators = etloom.analyze(job, "top-ops", top=10**9).filter(name="aten::copy_")
    assert "aten::copy_" in row
    assert int(values[0]) == operators["exclusive_ns"].sum()
    assert [int(values[2]), int(values[3])] == [operators["count"].sum(), 4]
    assert page.count("<details><summary>Operators by rank") == 1
    one = html_report.render_page(Job({0: job[0]}))
    assert "top-ops-sum" not in one and "Operators by rank" not in one


@pytest.mark.slow
def test_steps_and_many_ranks_have_a_column_each(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = etloom.open(data / "hta_multirank")
    monkeypatch.setattr(html_report, "MAX_BARS", 1)
    page = html_report.render_page(job)
    charts = re.findall(r'<figure class="columns">.*?</figure>', page, re.DOTALL)
    assert ["rank 0 to rank 1" in chart for chart in charts] == [True, False]
    assert ["step 551 to step 552" in chart for chart in charts] == [False, True]
    titles = re.findall("<title>(step 552: [^<]*)</title>", charts[1])
    assert len(titles) == 1 and "compute" in titles[0]


def test_columns_have_one_scale() -> None:
    columns = [("a", {"x": 50.0, "y": 0.0}), ("b<", {"x": 25.0, "y": 75.0})]
    html = render_columns(columns, {"x": "compute", "y": "idle"}, {"x": "X", "y": "Y"}, "title")
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"/>', html)]
    assert heights == [50, 0, 25, 75] and "b&lt;" in html


@pytest.mark.slow
def test_of_many_ranks_those_that_findings_name_are_drawn_first(data: Path) -> None:
    trace = open_run(data / "critical_path" / "simple_add.json.gz")[0]
    job = Job({rank: trace.replace(meta={**trace.meta, "rank": rank}) for rank in range(12)})
    path = pl.DataFrame(
        schema={"rank": pl.Int64, "event": pl.Int64, "start_ns": pl.Int64, "time_ns": pl.Int64}
    )
    timelines = pack_timelines(job, 1000, 3, path, [10, 7])
    assert [timeline.rank for timeline in timelines.packed] == [10, 7, 0]
    assert "The ranks that the findings name are at the top: 7, 10." in timelines.notes
    few = pack_timelines(Job({rank: job[rank] for rank in range(4)}), 1000, 64, path, [3])
    assert [timeline.rank for timeline in few.packed] == [0, 1, 2, 3]
