"""Charts with Altair: each has the figures of the analysis that it shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import etloom
from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Job

RUN = Path(__file__).parents[1] / "data" / "ddp_2"


@pytest.fixture(scope="module")
def job() -> Job:
    return etloom.open(RUN)


def test_an_unknown_chart_is_an_error(job: Job) -> None:
    with pytest.raises(UnknownName, match="chart"):
        etloom.plot(job, "breakdwon")


def test_without_altair_the_error_names_the_extra(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(EtloomError, match="pip install altair"):
        etloom.plot(job, "breakdown")


def test_the_breakdown_has_the_shares_of_each_rank(job: Job) -> None:
    pytest.importorskip("altair", reason="altair is not installed")
    chart = etloom.plot(job, "breakdown").to_dict()
    sums: dict[int, float] = {}
    for row in chart["data"]["values"]:
        sums[row["rank"]] = sums.get(row["rank"], 0) + row["share"]
    assert sums == {0: pytest.approx(100), 1: pytest.approx(100)}


@pytest.mark.slow
def test_the_critical_path_and_the_skew_have_the_times_of_their_analyses(job: Job) -> None:
    pytest.importorskip("altair", reason="altair is not installed")
    path = etloom.analyze(job, "critical-path", by="edge")
    bars = etloom.plot(job, "critical-path").to_dict()["data"]["values"]
    assert sum(bar["time_ms"] for bar in bars) == pytest.approx(path["time_ns"].sum() / 1e6)
    points = etloom.plot(job, "arrival-skew").to_dict()["data"]["values"]
    arrivals = etloom.analyze(job, "arrivals").drop_nulls("wait_ns")
    assert sum(point["wait_ms"] for point in points) == pytest.approx(arrivals["wait_ns"].sum() / 1e6)


def test_the_roofline_takes_the_options_of_its_analysis(job: Job) -> None:
    pytest.importorskip("altair", reason="altair is not installed")
    chart = etloom.plot(job, "roofline", peak_tflops=1.0, bandwidth_gbs=100.0).to_dict()
    assert all(row["intensity"] > 0 for row in chart["data"]["values"])


def test_memory_needs_a_recording_of_memory(job: Job) -> None:
    pytest.importorskip("altair", reason="altair is not installed")
    with pytest.raises(EtloomError, match="no rank recorded memory"):
        etloom.plot(job, "memory")
