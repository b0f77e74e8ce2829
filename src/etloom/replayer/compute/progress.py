"""Estimates the remaining time of a trial run, and stops the run at a deadline."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence

from etloom.replayer.compute.program_steps import ProgramStep, tensor_views

INTERRUPTED = "interrupted"
NOT_TRIED = "not tried"
TIME_LIMIT_REACHED = "the time limit was reached"
_CALL_OVERHEAD_BYTES = 1 << 20
"""Cost of a call that moves no data, in bytes: small calls say little about large ones."""


class Stopped(Exception):
    """Raised to stop a trial run before its next step; the message is the reason."""


class TrialProgress:
    """Measures the durations of a trial run's steps (operator calls), and estimates the time of the remaining steps.

    A step is expected to take as long as others of its name and shapes did; else its time is estimated per byte from
    steps of its name, else from all steps.

    Attributes:
        tried: Number of steps that have begun.
        total: Number of all steps.

    Args:
        deadline: time.monotonic() after which no step may begin.
    """

    def __init__(self, steps: Sequence[ProgramStep], deadline: float | None = None) -> None:
        self.tried = 0
        self.total = len(steps)
        self._steps = steps
        self._deadline = deadline
        self._bytes = [
            _CALL_OVERHEAD_BYTES + sum(view.bytes for view in (*tensor_views(step.values), *step.results))
            for step in steps
        ]
        self._seconds: Counter[Hashable] = Counter()
        self._amounts: Counter[Hashable] = Counter()  # steps per name and shapes; bytes per name, and of all
        self._began = time.monotonic()

    def begin_next(self) -> None:
        """Record that the next step of the trial run begins.

        Raises:
            Stopped: The deadline has passed.
        """
        now = time.monotonic()
        if self.tried:
            self._learn(self.tried - 1, now - self._began)
        if self._deadline is not None and now > self._deadline:
            raise Stopped(TIME_LIMIT_REACHED)
        self._began = now
        self.tried += 1

    def remaining_s(self) -> float:
        """Return the expected total duration, in seconds, of the steps that have not begun."""
        return sum(map(self._expected_s, range(self.tried, self.total)))

    def _learn(self, index: int, seconds: float) -> None:
        for key, amount in self._keys(index):
            self._seconds[key] += seconds  # type: ignore[assignment]
            self._amounts[key] += amount

    def _expected_s(self, index: int) -> float:
        for key, amount in self._keys(index):
            if key in self._amounts:
                return self._seconds[key] / self._amounts[key] * amount
        return 0.0

    def _keys(self, index: int) -> tuple[tuple[Hashable, int], ...]:
        """Return (key, calls or bytes) pairs by which the time of a step is estimated, the most specific pair first."""
        step, size = self._steps[index], self._bytes[index]
        return (_name_and_shapes(step), 1), (step.name, size), (None, size)


def _name_and_shapes(step: ProgramStep) -> Hashable:
    return step.name, tuple(view.shape for view in (*tensor_views(step.values), *step.results))
