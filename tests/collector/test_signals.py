"""Signals that arrive while the collector's code runs in the job's main thread."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from etloom.collector import fork_hold
from etloom.collector.session import recorder as recorder_module
from etloom.collector.session.recorder import Recorder


class JobTimeout(TimeoutError):
    """What a job raises on SIGALRM; an OSError, as a full disk is."""


def raise_timeout(number: int, frame: FrameType | None) -> None:
    raise JobTimeout("step took too long")


class Watchdog:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise JobTimeout("step took too long")

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise JobTimeout("step took too long")


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


HANDLERS: tuple[Callable[..., Any], ...] = (
    *(raise_timeout, Watchdog(), Watchdog().on_alarm, functools.partial(raise_timeout)),
)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("handler", HANDLERS, ids=["function", "object", "method", "partial"])
def test_exceptions_of_a_handler_of_the_job_reach_the_job(
    make_recorder: Callable[..., Recorder], handler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGALRM, handler)
    recorder = make_recorder()
    monkeypatch.setattr(recorder_module, "current_rank", lambda: signal.raise_signal(signal.SIGALRM))
    with pytest.raises(JobTimeout):
        recorder.begin()
    assert not fork_hold.profiler_lock._is_owned()


def test_exceptions_of_the_collector_do_not_reach_the_job(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make_recorder()
    monkeypatch.setattr(recorder_module, "current_rank", lambda: 1 // 0)
    recorder.begin()
    assert recorder.finished


@pytest.mark.parametrize("raised", [KeyboardInterrupt, JobTimeout])
def test_a_signal_while_a_fork_waits_leaves_no_lock(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def acquire(self, timeout: float) -> bool:
            raise raised

    monkeypatch.setattr(fork_hold, "_LOCKS", (fork_hold.profiler_lock, Interrupted()))
    interrupts: list[None] = []
    monkeypatch.setattr(fork_hold._thread, "interrupt_main", lambda: interrupts.append(None))
    if raised is KeyboardInterrupt:
        fork_hold._prepare_fork()  # a hook, whose exceptions Python ignores
    else:
        with pytest.raises(JobTimeout):
            fork_hold._prepare_fork()
    assert fork_hold.profiler_lock._is_owned()
    fork_hold._finish_fork()
    assert not fork_hold.profiler_lock._is_owned()
    assert len(interrupts) == (raised is KeyboardInterrupt)  # Ctrl-C arrives after the fork
    assert threading.get_ident() not in fork_hold._held


def test_a_signal_while_closerange_waits_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def acquire(self, timeout: float) -> bool:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "closerange", lambda *bounds: None)
    fork_hold.close_descriptors_apart(lambda: False)
    monkeypatch.setattr(fork_hold, "_LOCKS", (fork_hold.profiler_lock, Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        os.closerange(3, 256)
    assert not fork_hold.profiler_lock._is_owned()
