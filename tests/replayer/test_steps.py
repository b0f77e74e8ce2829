"""The recorded steps in a replay of computation: a step of the one is compared with a step of the other."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import etloom
from etloom.core.trace import Trace
from etloom.replayer.compute.program_steps import ProgramStep
from etloom.timeline.activity import find_steps
from support.replays import replay_trace

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
STEPS = {3: 2, 4: 3, 5: 2}
"""Step -> of how many products it is."""


def record(folder: Path, *, marked: bool = True, timed: bool = True) -> Trace:
    """Steps of matrix products with a sine between them, one more sine before and one after them."""
    x = torch.rand(4, 4)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(folder / "torch_et_0.json"))
    with torch.profiler.profile(execution_trace_observer=observer) as profiler:
        x.sin()
        for number, products in STEPS.items():
            with torch.profiler.record_function(f"ProfilerStep#{number}" if marked else "round"):
                for _ in range(products):
                    torch.mm(x, x).sin()
        x.sin()
    if timed:
        profiler.export_chrome_trace(str(folder / "kineto_trace_0.json"))
    return etloom.open(folder, use_cache=False)[0]


def products(trace: Trace) -> dict[int, int]:
    """Step -> how many products lie in it."""
    calls = trace.events.filter(pl.col("name").cast(pl.String) == "aten::mm")["ts"]
    return {
        step: calls.is_between(start, end).sum()
        for step, start, end in find_steps(trace).sort("step").iter_rows()
    }


@pytest.mark.slow
@pytest.mark.parametrize("timed", [True, False])
def test_a_replay_annotates_the_recorded_steps(tmp_path: Path, timed: bool) -> None:
    recording = record(tmp_path, timed=timed)
    done = replay_trace(recording, repeats=1)
    assert done.trace is not None and products(done.trace) == STEPS
    sines = done.trace.events.filter(pl.col("name").cast(pl.String) == "aten::sin")["ts"]
    assert sines.len() == sum(STEPS.values()) + 2
    marked = find_steps(done.trace)
    assert sines.min() < marked["start"].min()
    if timed:
        found = etloom.diff(recording, done.trace)
        assert found.stepped and not any("steps:" in line for line in found.notes)
        (row,) = (
            found.table("operator")
            .filter(pl.col("operator").cast(pl.String) == "aten::mm")
            .iter_rows(named=True)
        )
        assert row["count_before"] == row["count_after"] == pytest.approx(7 / 3)
        # What comes after the last step is in none.
        assert sines.max() > marked["end"].max()


def test_a_replay_of_one_step_is_of_that_step(tmp_path: Path) -> None:
    done = replay_trace(record(tmp_path), repeats=1, step=4)
    assert done.trace is not None and products(done.trace) == {4: 3}


@pytest.mark.slow
def test_a_replay_without_steps_annotates_none(tmp_path: Path) -> None:
    """Else all of it were one, and longer than any of the recording."""
    recording = record(tmp_path, marked=False)
    done = replay_trace(recording, repeats=1)
    assert done.trace is not None and not find_steps(done.trace).height
    assert not etloom.diff(recording, done.trace).stepped


@pytest.mark.slow
def test_an_interrupted_replay_annotates_complete_steps(tmp_path: Path) -> None:
    tried = []

    def interrupt(step: ProgramStep) -> None:
        tried.append(step.name)
        if tried.count("aten::mm") == 5:
            raise KeyboardInterrupt

    done = replay_trace(record(tmp_path), repeats=1, on_step=interrupt)
    assert done.stopped == "interrupted" and done.trace is not None
    assert products(done.trace) == {3: 2}
