"""The file that a rank under `collect --watch` writes: which process writes it, and its last state."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from etloom.collector.session import live_state
from etloom.collector.session.live_state import LiveState


class _Optimizer:
    pass


def read_state(folder: Path, rank: int = 0) -> dict[str, Any]:
    process: dict[str, Any] = json.loads((folder / f"fr_trace_{rank}.json").read_text())["process"]
    return process


def test_a_launcher_or_a_helper_of_a_rank_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = LiveState(tmp_path / "watch")
    state.write()
    state.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_trains_writes_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    state, optimizer = LiveState(tmp_path), _Optimizer()
    state.count_step(optimizer, (), {})
    state.write()
    assert (read_state(tmp_path, 1)["steps"], read_state(tmp_path, 1)["world_size"]) == (1, 2)


def test_a_rank_keeps_its_number_when_it_leaves_its_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = LiveState(tmp_path)
    with monkeypatch.context() as joined:
        joined.setattr(live_state, "is_distributed", lambda: True)
        joined.setattr(live_state, "current_rank", lambda: (3, 4))
        state.write()
    state.finish()
    assert [file.name for file in tmp_path.iterdir()] == ["fr_trace_3.json"]
    assert read_state(tmp_path, 3)["finished"]


def test_an_optimizer_that_is_freed_is_replaced(tmp_path: Path) -> None:
    state, first, second = LiveState(tmp_path), _Optimizer(), _Optimizer()
    for optimizer in (first, second, first):
        state.count_step(optimizer, (), {})
    del first, optimizer
    state.count_step(second, (), {})
    state.write()
    assert read_state(tmp_path)["steps"] == 3


def test_the_last_state_replaces_one_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, optimizer = LiveState(tmp_path), _Optimizer()
    state.count_step(optimizer, (), {})
    is_writing, may_write = threading.Event(), threading.Event()
    original = live_state.write_atomically

    def write_slowly(*arguments: Any) -> None:
        if threading.current_thread() is writer:
            is_writing.set()
            may_write.wait(10)
        original(*arguments)

    monkeypatch.setattr(live_state, "write_atomically", write_slowly)
    monkeypatch.setattr(state, "_interval_s", 0.001)
    writer = threading.Thread(target=state.run)
    writer.start()
    assert is_writing.wait(10)
    ending = threading.Thread(target=state.finish)
    ending.start()
    ending.join(0.05)
    may_write.set()
    ending.join()
    writer.join()
    assert read_state(tmp_path)["finished"]


def test_an_expensive_state_is_written_less_often() -> None:
    assert live_state.choose_interval(0.0001) == 0.5
    assert live_state.choose_interval(0.004) == 1.0
    assert live_state.choose_interval(1.0) == 1.25


def test_the_interval_follows_the_cost_and_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, optimizer = LiveState(tmp_path), _Optimizer()
    state.count_step(optimizer, (), {})
    waits: list[float] = []
    monkeypatch.setattr(state._ended, "wait", lambda seconds: waits.append(seconds) or len(waits) > 2)
    clock = iter([0.0, 0.004, 1.0, 1.004])
    monkeypatch.setattr(live_state.time, "thread_time", lambda: next(clock))
    state.run()
    assert waits == pytest.approx([0.5, 1.0, 1.0])
    assert read_state(tmp_path)["interval_s"] == pytest.approx(1.0)
