"""Findings state when their costliest occurrence was, so that the report can show it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from support.real_runs import open_run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "cpu/ddp_2", "hta_multirank", "critical_path/alexnet.json.gz"])
def test_each_finding_has_a_time(data: Path, name: str) -> None:
    job = open_run(data / name)
    findings = etloom.analyze(job, "findings")
    assert findings.height
    for row in findings.iter_rows(named=True):
        events = job[row["rank"]].events
        assert events["ts"].min() <= row["start_ns"] < row["end_ns"], row["pattern"]
        assert row["end_ns"] <= events.select((pl.col("ts") + pl.col("dur")).max()).item()


def test_the_time_of_a_delay_is_the_delay(data: Path) -> None:
    """Rank 2 of dlrm comes to its first all-to-all after the median rank: not the launch of 10 us there.

    Its recording begins later, too, which is why this delay is a finding of its own, of low confidence.
    """
    findings = etloom.analyze(open_run(data / "dlrm"), "findings", pattern="stragglers")
    delay = findings.filter(rank=2, confidence="low").row(0, named=True)
    assert delay["end_ns"] - delay["start_ns"] > 2_249_000


def test_the_time_of_exposed_communication_of_a_cpu_run(data: Path) -> None:
    findings = etloom.analyze(open_run(data / "cpu/ddp_2"), "findings", pattern="exposed-communication")
    assert findings["event"].null_count() == 0
