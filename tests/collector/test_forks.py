"""Forks and imports of a job: what the collector holds at that moment, and what it imports in the job's threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from etloom.collector import fork_hold
from etloom.collector.options import CollectOptions, RecordingOptions
from support.script_runs import OPTIONS, Comparison, Server


def wait_for_child(child: int, timeout_s: float = 30.0) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.mark.parametrize("lock", [fork_hold.profiler_lock, fork_hold.output_lock])
def test_a_fork_waits_for_the_work_of_another_thread(lock: object) -> None:
    fork_hold.register()
    inside, done = threading.Event(), []

    def work() -> None:
        with lock:  # type: ignore[attr-defined]
            inside.set()
            time.sleep(0.2)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:
        is_free = lock.acquire(timeout=1) and bool(done)  # type: ignore[attr-defined]
        os._exit(0 if is_free else 1)
    assert wait_for_child(child) == 0
    thread.join()
    with lock:  # type: ignore[attr-defined]
        pass  # free in the parent too


def test_a_fork_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_hold.register()
    monkeypatch.setattr(fork_hold, "_TIMEOUT_S", 0.05)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with fork_hold.profiler_lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    child = os.fork()
    if not child:  # the lock of a thread that does not exist here is free
        os._exit(0 if fork_hold.profiler_lock.acquire(timeout=1) else 1)
    assert wait_for_child(child) == 0
    leave.set()
    thread.join()


def test_a_fork_within_the_work_of_its_thread() -> None:
    fork_hold.register()
    with fork_hold.profiler_lock:
        child = os.fork()
    if not child:
        os._exit(0 if fork_hold.profiler_lock.acquire(timeout=1) else 1)
    assert wait_for_child(child) == 0


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("options", [*OPTIONS, "names"])
def test_nothing_is_imported_in_the_threads_of_a_job(
    tmp_path: Path, script_server: Server, options: str
) -> None:
    chosen = OPTIONS.get(options) or CollectOptions("2:8", step_name="^part")
    outcome = Comparison(tmp_path, script_server).run(("watched_imports", "14", "1"), chosen)
    assert (outcome.status, outcome.stdout) == (0, "finished\n")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("options", ["from the first step", "steps by time"])
def test_threads_that_import_torch_dynamo_at_the_same_time(tmp_path: Path, options: str) -> None:
    outcome = Comparison(tmp_path).run(("watched_imports", "3", "3", "slow"), OPTIONS[options])
    assert (outcome.status, outcome.stdout) == (0, "finished\n")
    assert "Traceback" not in outcome.stderr


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory, script_server: Server) -> Comparison:
    return Comparison(tmp_path_factory.mktemp("forks"), script_server)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("options", sorted(OPTIONS))
def test_hundreds_of_forks(comparison: Comparison, options: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        comparison.differences.clear()
        try:
            comparison.compare("fork", options, "12")
        finally:
            busy.kill()
    assert comparison.differences == []


@pytest.mark.torch
def test_operators_after_the_removal_of_the_callbacks_are_not_recorded() -> None:
    import torch

    from etloom.collector.session import fork_safety
    from etloom.collector.session.profilers import create_profiler

    profile = create_profiler(RecordingOptions("", ""), None, [])
    profile.prepare_trace()
    profile.start_trace()
    torch.ones(2).add(1)
    fork_safety.remove_callbacks_in_child(kineto=True, stock_observer=False)
    torch.ones(2).mul(3)
    profile.stop_trace()
    names = {event.name for event in profile.events()}
    assert "aten::add" in names
    assert "aten::mul" not in names


def test_closing_all_descriptors_waits_for_a_trace_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file would be closed too, and the rest of the trace would go into the job's next file."""
    writing = [True, True, False]
    closed: list[Any] = []
    locks: Any = (fork_hold.profiler_lock, fork_hold.output_lock)

    def closerange(*bounds: int) -> None:
        closed.append((bounds, list(writing), [lock._is_owned() for lock in locks]))

    monkeypatch.setattr(os, "closerange", closerange)
    fork_hold.close_descriptors_apart(lambda: writing.pop(0))
    os.closerange(3, 256)
    assert closed == [((3, 256), [], [True, True])]
    assert not any(lock._is_owned() for lock in locks)


def test_closing_all_descriptors_waits_no_longer_than_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "closerange", lambda *bounds: closed.append(bounds))
    monkeypatch.setattr(fork_hold, "_TIMEOUT_S", 0.02)
    fork_hold.close_descriptors_apart(lambda: True)
    os.closerange(3, 256)
    assert closed == [(3, 256)]
