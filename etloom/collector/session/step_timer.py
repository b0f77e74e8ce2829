"""Times the steps before a window, without any recorder: what the job takes when nobody looks."""

from __future__ import annotations

import statistics
import time
from collections import deque
from itertools import pairwise
from typing import Any

from .rank_facts import is_cuda_in_use

_MAX_STEPS = 8


class StepTimer:
    """Keeps the ends of the last steps outside of windows, on the host and, where one is in use, on the device.

    The host of a job that is bound by its device runs ahead, so its own clock says little about single steps.

    Args:
        on_job_thread: The thread that marks steps is the job's; another one does not know the device.
    """

    def __init__(self, on_job_thread: bool) -> None:
        self._on_job_thread = on_job_thread
        self._ends: deque[tuple[int, int, Any]] = deque(maxlen=_MAX_STEPS + 1)

    def mark(self, count: int) -> None:
        """Note that `count` steps have ended."""
        event = _record_event() if self._on_job_thread else None
        self._ends.append((count, time.monotonic_ns(), event))

    def measure(self) -> dict[str, Any] | None:
        """Return the median step time in ns, the number of steps and the clock (device or host); None without a step.

        The first step of the job does not count if there are others.
        """
        ends = list(self._ends)
        on_device = all(event is not None and event.query() for _, _, event in ends)
        times = [
            (count, int(begin_event.elapsed_time(event) * 1e6) if on_device else end - begin)
            for (before, begin, begin_event), (count, end, event) in pairwise(ends)
            if count == before + 1
        ]
        later = [duration for count, duration in times if count > 1] or [duration for _, duration in times]
        if not later:
            return None
        clock = "device" if on_device else "host"
        return {"step_ns": int(statistics.median(later)), "steps": len(later), "clock": clock}


def _record_event() -> Any:
    """Record an event on the current stream; None without a CUDA device, and while a graph is captured."""
    if not is_cuda_in_use():
        return None
    from torch import cuda

    if cuda.is_current_stream_capturing():
        return None
    event = cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
