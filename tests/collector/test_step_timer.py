"""The times of steps without a recorder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etloom.collector.session import schedule, signal_errors
from etloom.collector.session.schedule import StepTimer

Event = Any


class FakeEvent:
    def __init__(self, time_ms: float, ready: bool = True) -> None:
        self.time_ms, self.ready = time_ms, ready

    def query(self) -> bool:
        return self.ready

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.time_ms - self.time_ms


@pytest.fixture
def mark_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[int | None, Event]]], StepTimer]:
    def mark(events: list[tuple[int | None, Event]]) -> StepTimer:
        timer, rest = StepTimer(), iter(events)
        monkeypatch.setattr(schedule, "_record_event", lambda: next(rest))
        for steps in range(len(events)):
            timer.mark(steps)
        return timer

    return mark


Mark = Callable[[list[tuple[int | None, Event]]], StepTimer]


def test_the_first_step_does_not_count_if_there_are_others(mark_all: Mark) -> None:
    timer = mark_all([(0, FakeEvent(time)) for time in (0, 90, 100, 112, 122)])
    assert timer.measure() == {"step_ns": 10_000_000, "steps": 3, "clock": "device"}


def test_pairs_with_events_count_and_the_others_do_not(mark_all: Mark) -> None:
    """No event before CUDA is in use, none that is still pending, none of two devices."""
    events = [
        (None, None),
        (0, FakeEvent(0)),
        (0, FakeEvent(5)),
        (1, FakeEvent(50)),
        (1, FakeEvent(56, ready=False)),
    ]
    assert mark_all(events).measure() == {"step_ns": 5_000_000, "steps": 1, "clock": "device"}


def test_without_a_step_there_is_no_time() -> None:
    timer = StepTimer()
    timer.mark(3)
    timer.mark(5)
    assert timer.measure() is None


def test_an_error_of_the_device_costs_the_times_only(monkeypatch: pytest.MonkeyPatch, mark_all: Mark) -> None:
    class Broken(FakeEvent):
        def query(self) -> bool:
            raise RuntimeError("device-side assert triggered")

    measured = mark_all([(0, Broken(time)) for time in range(4)]).measure()
    assert measured is not None and measured["clock"] == "host"


def test_an_exception_of_the_jobs_signal_handler_reaches_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timeout(RuntimeError):
        pass

    def interrupt() -> Any:
        raise Timeout

    monkeypatch.setattr(schedule, "_record_event", interrupt)
    monkeypatch.setattr(signal_errors, "is_raised_by_handler", lambda error: isinstance(error, Timeout))
    with pytest.raises(Timeout):
        StepTimer().mark(0)


@pytest.mark.slow
@pytest.mark.torch
def test_a_recording_has_the_step_time_before_it(tmp_path: Path) -> None:
    import json
    import time

    torch = pytest.importorskip("torch")

    import etloom

    with etloom.record(tmp_path / "run", steps="5:7", sources="et", observer="stock") as recording:
        for _ in range(8):
            torch.ones(2).add(1)
            time.sleep(0.01)
            recording.step()
    facts = json.loads((tmp_path / "run" / "rank_0.json").read_text())["unrecorded"]
    assert facts["clock"] == "host" and facts["steps"] >= 2
    assert 10_000_000 <= facts["step_ns"] < 1_000_000_000
