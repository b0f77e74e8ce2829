"""Problems injected into re-timed real traces (benchmarks/diagnosis): their cost, and the finding that names them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import etloom

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "diagnosis"))

from inject.bases import open_base
from inject.cases import Case, diagnose, make_case
from inject.draft import Draft

pytestmark = pytest.mark.usefixtures("data")
SEED, STRENGTH = 1, 10.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["slow process", "slow loader (CPU)", "loop over elements", "checkpoint (CPU)"]
)
def test_the_injected_problem_is_the_first_finding(kind: str) -> None:
    row = diagnose(Case(kind, "cpu", STRENGTH, SEED))
    assert row["place"] == 0, row["findings"]
    assert row["cost_error_pct"] < 20


def test_the_cost_is_the_strength_of_the_clean_run() -> None:
    injected = make_case(Case("slow loader (CPU)", "cpu", STRENGTH, SEED))
    clean = make_case(Case("clean", "cpu", 0.0, SEED))
    first, last = (_measure_ns(run.job) for run in (clean, injected))
    assert last - first == pytest.approx(STRENGTH / 100 * first, rel=0.05)
    assert injected.cost_ns == pytest.approx(last - first, rel=0.05)


def test_a_draft_without_changes_has_the_times_of_the_recording() -> None:
    base = open_base("cpu")
    draft = Draft(base, base.dependencies.graph.lag)
    times = draft.compute_times(0.0)
    assert np.array_equal(times[draft._built.point], base.dependencies.graph.time)


def _measure_ns(job: etloom.Job) -> int:
    """Return the time from the first step's start to the last step's end."""
    steps = etloom.analyze(job, "steps")
    return int(steps.select((steps["start_ns"] + steps["dur_ns"]).max() - steps["start_ns"].min()).item())
