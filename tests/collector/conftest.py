"""A recorder whose windows record nothing, and a process that has torch loaded and forks jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etloom.collector.observer import BuildError, build_library
from etloom.collector.options import RecordingOptions
from etloom.collector.session import recorder
from support.script_runs import Server, serve
from support.windows import FakeWindow


@pytest.fixture
def make_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.setattr("etloom.collector.session.recorder.Window", FakeWindow)
    monkeypatch.setattr(FakeWindow, "done", [])
    monkeypatch.setattr(FakeWindow, "gate", None)

    def make(**options: Any) -> recorder.Recorder:
        from contextlib import nullcontext

        session = recorder.Recorder(RecordingOptions(str(tmp_path), str(tmp_path / "s"), **options))
        session._guard = SimpleNamespace(
            active_profiler=lambda: None, allow_profilers=nullcontext, remove=lambda: None
        )  # type: ignore[assignment]
        return session

    return make


@pytest.fixture(scope="session")
def script_server() -> Iterator[Server]:
    """Runs the scripts of `scripts` in forks of one process that has imported torch."""
    pytest.importorskip("torch")
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the native observer cannot be built here: {error}")
    with serve() as server:
        yield server
