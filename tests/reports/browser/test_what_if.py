"""The what-if control of the report predicts what `etloom simulate` predicts."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.core.trace import Job
from etloom.simulator.recorded_run import get_recorded_run
from support.browser_pages import Open, settle
from support.real_runs import open_run

pytestmark = pytest.mark.browser

PREDICT = """([change, factor]) => {
  const { run, steps, path } = etloom.whatIf.predict(change, factor);
  return [run, steps, [...path]];
}"""
OPTIONS = "() => [...document.getElementById('what-if-change').options].map((option) => option.textContent)"


def choose(page: Any, label: str, position: int) -> tuple[list[str], float]:
    """Choose a change and a position of the slider; return the changes of the command line and its seconds."""
    page.locator("#what-if-change").select_option(label=label)
    seconds = page.evaluate(
        """(position) => {
          const began = performance.now();
          const slider = document.getElementById("what-if-factor");
          slider.value = position;
          slider.dispatchEvent(new Event("input"));
          return (performance.now() - began) / 1000;
        }""",
        position,
    )
    words = shlex.split(page.locator("#what-if-command").inner_text())
    assert words[:2] == ["etloom", "simulate"]
    return [word for before, word in pairwise(words) if before == "--set"], seconds


@pytest.mark.slow
@pytest.mark.parametrize("run", ["nccl_ddp", "cpu/ddp_2", "cpu/pp_4", "dlrm", "tracelens/mi300_qwen.json.gz"])
def test_every_change_equals_the_verb(show: Open, data: Path, run: str) -> None:
    job = open_run(data / run)
    page = show(job)
    page.wait_for_selector("#tracks[data-whole]")
    labels = page.evaluate(OPTIONS)
    assert len(labels) > 3
    for number, label in enumerate(labels):
        for position in (-100, -37, 42, 100) if number < 4 else (-30,):
            changes, seconds = choose(page, label, position)
            assert seconds < 1
            table = etloom.simulate(job, *changes).table
            factor = float(changes[0].rpartition(" x")[2])
            run_ns, steps, _ = page.evaluate(PREDICT, [number, factor])
            expected = table.filter(scope="job").select("upper_bound_ns", "lower_bound_ns").row(0)
            assert run_ns == pytest.approx(expected, abs=1000), (label, factor)
            expected_steps = table.filter(scope="step").select("upper_bound_ns", "lower_bound_ns").rows()
            for step, bounds in zip(steps, expected_steps, strict=True):
                assert step == pytest.approx(bounds, abs=1000), (label, factor)


@pytest.mark.slow
def test_without_a_change_the_path_is_the_recorded_one(show: Open, data: Path) -> None:
    job = open_run(data / "nccl_ddp")
    page = show(job)
    page.wait_for_selector("#tracks[data-whole]")
    run_ns, _, path = page.evaluate(PREDICT, [0, 1])
    assert run_ns == [get_recorded_run(job).makespan] * 2
    parts = dict(zip(page.evaluate("() => etloom.whatIf.parts"), path, strict=True))
    assert sum(path) == run_ns[0]
    for text in get_recorded_run(job).critical_path.split(", "):
        percent, _, part = text.partition(" % ")
        assert 100 * parts[part] / run_ns[0] == pytest.approx(float(percent), abs=0.6)


@pytest.mark.slow
def test_the_link_keeps_the_change(show: Open, ddp: Job) -> None:
    page = show(ddp)
    page.wait_for_selector("#tracks[data-whole]")
    choose(page, "host threads", -30)
    answer = page.locator("#what-if-answer").inner_text()
    assert "instead of" in answer
    settle(page)
    page.wait_for_timeout(300)
    again = show(ddp, state=page.evaluate("() => location.hash"))
    again.wait_for_selector("#tracks[data-whole]")
    assert again.locator("#what-if-answer").inner_text() == answer
    again.locator("#what-if-reset").click()
    assert "+0.0 %" in again.locator("#what-if-answer").inner_text()
