"""When calls were made and when they were done."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch


class Clock:
    """Times of calls: on the host of the call and of its completion, on a GPU of what the stream saw.

    blocked_ns: how long the host, on a GPU the stream of the operators, stood in waits since `begin`; on a GPU known
    when the calls are `finished`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._side: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self.blocked_ns = 0
        self._done: list[int] = []
        self._events: list[tuple[int, Any, Any]] = []

    def begin(self, count: int) -> None:
        self.blocked_ns = 0
        self._done = [0] * count
        self._events = []
        if self._cuda:
            torch.cuda.synchronize()
            self._origin = _new_event()
            self._origin.record()
            self._zero = time.monotonic_ns()

    def watch(self, at: int, work: Any) -> None:
        """Note when work completes, where the backend can tell; gloo cannot of messages."""
        if self._cuda or work is None:
            return
        done = self._done

        def note(_: Any) -> None:
            done[at] = time.monotonic_ns()

        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(note)

    def wait(self, at: int, work: Any) -> None:
        if not self._cuda:
            start = time.monotonic_ns()
            if work is not None:
                work.wait()
            now = time.monotonic_ns()
            self._done[at] = self._done[at] or now
            self.blocked_ns += now - start
            return
        operators = torch.cuda.current_stream()
        before = _new_event()
        before.record(operators)
        with torch.cuda.stream(self._side):
            if work is not None:
                work.wait()
            end = _new_event()
            end.record()
        operators.wait_event(end)
        self._events.append((at, before, end))

    def finished(self) -> list[int]:
        if self._cuda:
            torch.cuda.synchronize()
            for at, before, end in self._events:
                self._done[at] = self._zero + round(self._origin.elapsed_time(end) * 1e6)
                self.blocked_ns += max(0, round(before.elapsed_time(end) * 1e6))
        return self._done


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
