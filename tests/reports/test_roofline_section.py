"""The roofline of a report: its operators are those of the analysis, at the places that their rates say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import etloom
from etloom.core.trace import Job, Trace
from etloom.reports.roofline_section import MAX_ROWS, _render_point, render_roofline
from support.reports import HOSTILE


@pytest.mark.slow
def test_operators_lie_where_their_rates_say(data: Path) -> None:
    job = etloom.open(data / "nccl_ddp")
    html = render_roofline(job)
    rows = etloom.analyze(job[0], "roofline", top=MAX_ROWS)
    drawn = rows.filter(rows["intensity"] > 0, rows["tflops_per_s"] > 0)
    points = re.findall(r'<circle class="(\w+)" cx="([\d.]+)%" cy="([\d.]+)%" r="([\d.]+)">', html)
    assert [point[0] for point in points] == drawn["bound"].to_list()
    places = np.array([point[1:] for point in points], float)
    for column, place, sign in (("intensity", places[:, 0], 1), ("tflops_per_s", places[:, 1], -1)):
        exponents = np.log10(drawn[column].to_numpy())
        line = np.polyfit(exponents, place, 1)
        assert sign * line[0] > 0 and np.abs(np.polyval(line, exponents) - place).max() < 0.01
    assert "tf32: 156 TFLOP/s" in html and html.count("<line ") == 3
    assert places[0, 2] == places[:, 2].max()  # the longest first


def test_without_peaks_or_shapes_there_is_no_roofline(data: Path) -> None:
    assert render_roofline(Job({0: Trace()})) == ""
    assert render_roofline(etloom.open(data / "cpu" / "ddp_2")) == ""


def test_names_are_escaped() -> None:
    row = {"name": HOSTILE, "time_ns": 5, "roofline_pct": 20.0, "tflops_per_s": 0.1, "bound": "memory"}
    text = _render_point(row, 50.0, 50.0, 1.0)
    assert text.count("<") == 4 and "&lt;" in text
