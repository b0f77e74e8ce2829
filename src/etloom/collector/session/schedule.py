"""Schedules recording windows (fixed steps, periodic, on demand, ring buffer), and times the steps outside of them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..options import RecordingOptions
from . import signal_errors
from .on_demand import WindowRequests
from .rank_facts import is_cuda_in_use

_MIN_STEPS_AHEAD = 3


class WindowSchedule:
    """Determines the next recording window: steps [first, last); last None means to the end of the job.

    Attributes:
        accepts_requests: Windows are recorded on demand.
        uses_ring: A ring buffer also keeps what came before a request, so its window opens at once.
        is_waiting: There is no next window until somebody requests one.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self._options = options
        self._warmup_steps = options.warmup_steps
        self.accepts_requests = options.on_demand is not None
        self.uses_ring = options.ring and options.on_demand is not None
        self.first, self.last = options.first, None if self.uses_ring else options.last
        self.is_waiting = options.on_demand is not None and not self.uses_ring
        self._requests = WindowRequests(Path(options.out), is_cleared=options.supervised)

    def __str__(self) -> str:
        return f"{self.first}:{'' if self.last is None else self.last}"

    @property
    def window_length(self) -> int | None:
        """Number of steps of the window, or None if it is not known in advance."""
        return None if self.last is None or self.uses_ring else self.last - self.first

    @property
    def is_requested(self) -> bool:
        """True if the next window is a window on demand that has been requested."""
        return self.accepts_requests and not (self.is_waiting or self.uses_ring)

    @property
    def is_unrequested_ring(self) -> bool:
        """True while the ring buffer records and nobody has requested to save the recorded steps."""
        return self.uses_ring and self.last is None

    def take_late_request(self, rank: int) -> bool:
        """Remove an unanswered recording request when a job without a launcher ends; return True if there was any.

        Rank 0 removes it, so that the next job in this folder does not take it.
        """
        if not self.accepts_requests or rank or self._options.supervised:
            return False
        return self._requests.withdraw()

    def is_due(self, count: int) -> bool:
        """Return whether, after `count` steps, the profilers of the next window should be prepared or running."""
        return not self.is_waiting and count >= self.first - self._warmup_steps

    def is_over(self, count: int) -> bool:
        return self.last is not None and count >= self.last

    def poll_requests(self, count: int) -> bool:
        """Schedule a newly requested recording window after `count` steps; return whether there was a new request."""
        if not (self.is_waiting or self.is_unrequested_ring):
            return False
        ahead = max(_MIN_STEPS_AHEAD, self._warmup_steps + 1)
        window = self._requests.next_window(count, self._options.on_demand or 1, ahead)
        if window is None:
            return False
        if self.uses_ring:
            self.last = max(window[1], count)
        else:
            self.first, self.last = window
            self.is_waiting = count > self.first  # too late
        return True

    def advance(self, count: int) -> bool:
        """Schedule the next recording window after `count` steps; return False if there is no further window."""
        every = self._options.every
        if every is not None and self.last is not None:
            windows = max(1, -(-(count + 1 - self.first) // every))
            self.first, self.last = self.first + windows * every, self.last + windows * every
        elif self.uses_ring:
            self.first, self.last = count + self._warmup_steps, None
        elif self._options.on_demand is not None:
            self.is_waiting = True
        else:
            return False
        return True


# Measures the step time outside of recording windows, while no profiler runs.

_MAX_STEPS = 8


class _StepEnd(NamedTuple):
    """A recorded step end: number of ended steps, host time in ns, CUDA device and CUDA event (None without CUDA)."""

    steps: int
    time_ns: int
    device: int | None
    event: Any


class StepTimer:
    """Stores the end times of the last steps outside of windows, on the host and, if CUDA is in use, on the device.

    The host of a job that is bound by its device runs ahead, so the host's clock does not measure single steps. If the
    device reports an error, the times are dropped and the job continues.
    """

    def __init__(self) -> None:
        self._ends: deque[_StepEnd] = deque(maxlen=_MAX_STEPS + 1)

    def mark(self, count: int) -> None:
        """Record the current time as the end of a step; `count` steps of the job have ended so far."""
        try:
            device, event = _record_event()
        except Exception as error:
            if signal_errors.is_raised_by_handler(error):
                raise
            device = event = None
        self._ends.append(_StepEnd(count, time.monotonic_ns(), device, event))

    def measure(self) -> dict[str, Any] | None:
        """Return the median step time in ns, the number of steps and the clock (device or host); None without any step.

        The first step of the job does not count if there are others. Steps between events on the device count if there
        are any, since the host may run ahead of it.
        """
        pairs = [(begin, end) for begin, end in pairwise(self._ends) if end.steps == begin.steps + 1]
        try:
            on_device = _time_on_device(pairs)
        except Exception as error:
            if signal_errors.is_raised_by_handler(error):
                raise
            on_device = []
        times = on_device or [(end.steps, end.time_ns - begin.time_ns) for begin, end in pairs]
        later = [duration for count, duration in times if count > 1] or [duration for _, duration in times]
        if not later:
            return None
        clock = "device" if on_device else "host"
        return {"step_ns": int(statistics.median(later)), "steps": len(later), "clock": clock}


def _record_event() -> tuple[int | None, Any]:
    """Record an event on the current CUDA stream; return (device, event), or (None, None) if that is impossible.

    It is impossible without a CUDA device, and while a graph is captured.
    """
    if not is_cuda_in_use() or _is_capturing():
        return None, None
    from torch import cuda

    event = cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return cuda.current_device(), event


def _time_on_device(pairs: list[tuple[_StepEnd, _StepEnd]]) -> list[tuple[int, int]]:
    """Return (number of ended steps, step duration in ns) for each pair of successive step ends on the same GPU."""
    timed = [pair for pair in pairs if pair[0].event is not None and pair[0].device == pair[1].device]
    if not timed or _is_capturing():  # a query would end the capture
        return []
    return [
        (end.steps, int(begin.event.elapsed_time(end.event) * 1e6))
        for begin, end in timed
        if begin.event.query() and end.event.query()
    ]


def _is_capturing() -> bool:
    from torch import cuda

    return bool(is_cuda_in_use() and cuda.is_current_stream_capturing())
