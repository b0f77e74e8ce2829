"""Notebook output of a difference and of a prediction."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest

import etloom

RUN = Path(__file__).parents[1] / "data" / "ddp_2"


@pytest.mark.slow
def test_a_difference_shows_its_verdict_and_a_table() -> None:
    difference = etloom.diff(RUN, RUN)
    html = difference._repr_html_()
    assert escape(difference.verdict) in html and "<table" in html


@pytest.mark.slow
def test_a_prediction_shows_its_changes_and_gives_a_job() -> None:
    prediction = etloom.simulate(RUN, "comm x0")
    html = prediction._repr_html_()
    assert "comm x0" in html and "<table" in html and escape(prediction.reasons[-1]) in html
    assert etloom.analyze(prediction.job, "temporal-breakdown").height


@pytest.mark.slow
def test_a_dependency_graph_has_its_algorithms_as_methods() -> None:
    graph = etloom.graph(RUN)
    path = graph.critical_path()
    assert path["time_ns"].sum() == graph.makespan() > 0
    assert (graph.compute_times() == graph.graph.time).all()
    assert graph.slack().min() == 0
