"""Measures the step time outside of recording windows, while no profiler runs."""

from __future__ import annotations

import statistics
import time
from collections import deque
from itertools import pairwise
from typing import Any, NamedTuple

from . import signal_errors
from .rank_facts import is_cuda_in_use

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
