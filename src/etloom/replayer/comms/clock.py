"""Measures when communication calls complete, and how long waiting for them blocks the host or the GPU stream."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


class Clock:
    """Measures when communication calls complete: on a CPU by the host's clock, on a GPU by events on a stream.

    Attributes:
        blocked_ns: Time since `begin` that the host (on a GPU: the stream of the operators) was blocked in waits. On a
            GPU it is known only after `finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._side_stream: Any = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self.blocked_ns = 0
        self._completed: list[int] = []
        self._events: list[tuple[int, Any, Any]] = []

    def begin(self, count: int) -> None:
        """Reset all times before a pass of ``count`` calls."""
        self.blocked_ns = 0
        self._completed = [0] * count
        self._events = []
        if self._is_cuda:
            torch.cuda.synchronize()
            self._origin = _new_event()
            self._origin.record()
            self._origin_ns = time.monotonic_ns()

    def watch(self, index: int, work: Any) -> None:
        """On a CPU, record when a call completes, if the backend reports this (gloo: not for sends and receives)."""
        if self._is_cuda or work is None:
            return
        completed = self._completed

        def record(_: Any) -> None:
            completed[index] = time.monotonic_ns()

        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(record)

    def wait(self, index: int, work: Any) -> None:
        """Wait until a call completes; on a GPU the current stream waits instead of the host."""
        if self._is_cuda:
            self._wait_on_stream(index, work)
            return
        start = time.monotonic_ns()
        if work is not None:
            work.wait()
        now = time.monotonic_ns()
        self._completed[index] = self._completed[index] or now
        self.blocked_ns += now - start

    def _wait_on_stream(self, index: int, work: Any) -> None:
        operators = torch.cuda.current_stream()
        before = _new_event()
        before.record(operators)
        with torch.cuda.stream(self._side_stream):
            if work is not None:
                work.wait()
            end = _new_event()
            end.record()
        operators.wait_event(end)
        self._events.append((index, before, end))

    def finish(self) -> list[int]:
        """Return the completion time of each call in ns on the monotonic clock."""
        if self._is_cuda:
            torch.cuda.synchronize()
            for index, before, end in self._events:
                self._completed[index] = self._origin_ns + round(self._origin.elapsed_time(end) * 1e6)
                self.blocked_ns += max(0, round(before.elapsed_time(end) * 1e6))
        return self._completed


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
