"""torch's profiler starts and stops while other threads run operators."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from etloom.collector.observer import BuildError, build_library
from etloom.collector.observer.profiler_gate import GateError, ProfilerGate
from etloom.collector.options import RecordingOptions
from etloom.collector.session.profilers import create_profiler
from support.windows import FakeWindow

pytestmark = pytest.mark.torch

# Without the gate, torch 2.13 dies here within some hundred windows: in half a minute on two cores. Without regard to
# operators that begin while the profiler starts, within 40.
_RACE = """
import threading, time
import torch
from etloom.collector.observer.profiler_gate import ProfilerGate
from etloom.collector.options import RecordingOptions
from etloom.collector.session.profilers import create_profiler

def run_operators():
    layer = torch.nn.Linear(4, 4)
    while not ended.is_set():
        with torch.profiler.record_function("scope"):
            for _ in range(20):
                (layer.weight @ layer.weight + 1).sum()
        layer(torch.ones(2, 4)).sum().backward()

ended = threading.Event()
threads = [threading.Thread(target=run_operators) for _ in range(3)]
with torch.autograd.profiler.profile(use_kineto=True):
    pass
for thread in threads:
    thread.start()
deadline = time.monotonic() + SECONDS
windows = 0
while time.monotonic() < deadline or windows < 5:
    gate = ProfilerGate()
    if not gate.is_clear():
        continue
    profile = create_profiler(RecordingOptions("", ""), None, [])
    profile.prepare_trace()
    with gate.starting():
        profile.start_trace()
        time.sleep(START)
    time.sleep(WINDOW)
    with gate.stopping():
        profile.stop_trace()
    windows += 1
ended.set()
for thread in threads:
    thread.join()
print(windows)
"""


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the native observer cannot be built here: {error}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "window"),
    [
        pytest.param(0, 0.005, id="operators that begin and end in a window"),
        pytest.param(0.003, 0.0005, id="operators that begin while the profiler starts"),
    ],
)
def test_windows_open_and_close_between_operators_of_other_threads(start: float, window: float) -> None:
    script = f"START, WINDOW, SECONDS = {start}, {window}, 10{_RACE}"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr[-1000:]
    assert int(process.stdout.split()[-1]) >= 5


def _profile() -> Any:
    return create_profiler(RecordingOptions("", ""), None, [])


def test_an_operator_that_outlives_its_window_is_noticed() -> None:
    from torch.profiler import record_function

    gate, profile = ProfilerGate(), _profile()
    profile.prepare_trace()
    with gate.starting():
        profile.start_trace()
    with record_function("longer than the window"):
        with gate.stopping():
            profile.stop_trace()
        assert not gate.is_clear()
    assert gate.is_clear()


def test_a_profiler_that_cannot_be_stopped_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, profile = ProfilerGate(), _profile()
    profile.prepare_trace()
    with gate.starting():
        profile.start_trace()
    monkeypatch.setattr("etloom.collector.observer.profiler_gate._PAUSE_S", 0)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "_library", _Occupied(gate._library))
        with pytest.raises(GateError, match="is still in a callback"), gate.stopping():
            profile.stop_trace()
    assert profile.profiler.kineto_results is None
    profile.stop_trace()


class _Occupied:
    """The library, with a thread that stays inside."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return (lambda _: 0) if name == "etloom_gate_close" else getattr(self._library, name)


@pytest.mark.slow
def test_no_window_opens_while_an_operator_of_the_previous_one_runs(
    make_recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make_recorder(first=1, last=2)
    monkeypatch.setattr(FakeWindow, "can_start", lambda _self: False)
    recorder.begin()
    recorder.end_step()
    assert recorder.finished
    assert "of the previous window has not ended" in "".join(recorder.messages.messages)
    assert FakeWindow.done == []
