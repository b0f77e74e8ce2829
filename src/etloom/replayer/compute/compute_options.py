"""Options of a computation replay, and callbacks by which it reports its progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etloom.replayer.compute.program_steps import ProgramStep, tensor_views

if TYPE_CHECKING:
    from etloom.replayer.compute.program_steps import ProgramStep

DEVICES = ("cpu", "cuda", "meta")


@dataclass(frozen=True)
class ComputeOptions:
    """Options for replaying the recorded operators.

    Attributes:
        device: cpu, cuda, or meta (shapes and types only).
        gpu: Index of the GPU, if there are several.
        namespaces: Namespaces of the operators that may run. Operators that open files or trust their sizes never run.
        step: Replay only ProfilerStep#N (default: all).
        subgraph: Replay only operators and annotations of this name, with what they contain (default: all).
        repeats: Number of timed passes.
        warmup: Number of passes before these.
        threads: Threads of an operator on a CPU, for the rest of the process (default: torch's).
        max_bytes: Memory limit (default: `memory_limits.memory_limit`). Operators that do not fit are skipped.
        deadline: time.monotonic() after which no operator is tried, and no repeat is started that would take longer.
        operator_timeout_s: Seconds after which `replay_isolated` skips an operator (default: 5).
        trace: Return a trace of the replay, which takes one more pass.
    """

    device: str = "cpu"
    gpu: int = 0
    namespaces: frozenset[str] = frozenset({"aten"})
    step: int | None = None
    subgraph: str | None = None
    repeats: int = 3
    warmup: int = 1
    threads: int | None = None
    max_bytes: int | None = None
    deadline: float | None = None
    operator_timeout_s: float | None = None
    trace: bool = True


@dataclass(frozen=True)
class ComputeHooks:
    """Callbacks by which a computation replay reports its progress.

    Attributes:
        on_step: Called with each step before it is tried for the first time.
        on_all_tried: Called when all steps were tried.
        notify: Called with progress messages, one line each.
    """

    on_step: Callable[[ProgramStep], None] = lambda step: None
    on_all_tried: Callable[[], None] = lambda: None
    notify: Callable[[str], None] = lambda line: None


# Estimates the remaining time of a trial run, and stops the run at a deadline.

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
