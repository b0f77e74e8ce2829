"""`etloom.metrics`: numbers for experiment trackers."""

from __future__ import annotations

import math

import pytest

import etloom
from etloom.cli.demo import RECORDING


@pytest.mark.slow
def test_figures_agree_with_the_analyses() -> None:
    metrics = etloom.metrics(RECORDING)
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    steps = etloom.analyze(RECORDING, "steps")
    means = steps.group_by("rank").mean()["dur_ns"].mean()
    assert metrics["etloom/step_ms"] == pytest.approx(means / 1e6, rel=1e-3)
    findings = etloom.analyze(RECORDING, "findings")
    for pattern in findings["pattern"].unique():
        gains = findings.filter(pattern=pattern)["job_gain_pct"]
        assert metrics[f"etloom/finding/{pattern}_pct"] == gains.max()
    assert metrics["etloom/ranks"] == 2
    assert {name.removeprefix("x.") for name in etloom.metrics(RECORDING, prefix="x.")} == {
        name.removeprefix("etloom/") for name in metrics
    }
