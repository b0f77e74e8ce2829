"""How far a rehearsal is, how long the rest of it will take, and what ends it before its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence

from etloom.replayer.compute.program_steps import ProgramStep, tensor_views

INTERRUPTED = "interrupted"
NOT_TRIED = "not tried"
OUT_OF_TIME = "the time was up"
_CALL_OVERHEAD_BYTES = 1 << 20
"""What a call costs that moves nothing, in bytes: a small one tells little of a large one."""


class Stopped(Exception):
    """Of a rehearsal, before the next step; its text is the reason."""


class TrialProgress:
    """The steps of a rehearsal, which are told one after the other as they begin.

    tried: how many have begun. until: by time.monotonic(), when no more may. A step is expected to take what others of
    its name and shapes took, else what its name took a byte, else what all did.
    """

    def __init__(self, steps: Sequence[ProgramStep], until: float | None = None) -> None:
        self.tried = 0
        self.total = len(steps)
        self._steps = steps
        self._until = until
        self._bytes = [
            _CALL_OVERHEAD_BYTES + sum(view.bytes for view in (*tensor_views(one.values), *one.results))
            for one in steps
        ]
        self._spent: Counter[Hashable] = Counter()
        self._done: Counter[Hashable] = Counter()  # steps of a name and shapes; bytes of a name, and of all
        self._began = time.monotonic()

    def next(self) -> None:
        """The next step begins. Raises Stopped where it may not."""
        now = time.monotonic()
        if self.tried:
            self._learn(self.tried - 1, now - self._began)
        if self._until is not None and now > self._until:
            raise Stopped(OUT_OF_TIME)
        self._began = now
        self.tried += 1

    def left_s(self) -> float:
        """What the steps that have not begun will take, by those that have ended."""
        return sum(map(self._expected, range(self.tried, self.total)))

    def _learn(self, at: int, seconds: float) -> None:
        step = self._steps[at]
        for key, amount in (
            (_name_and_shapes(step), 1),
            (step.name, self._bytes[at]),
            (None, self._bytes[at]),
        ):
            self._spent[key] += seconds  # type: ignore[assignment]
            self._done[key] += amount

    def _expected(self, at: int) -> float:
        step = self._steps[at]
        for key, amount in (
            (_name_and_shapes(step), 1),
            (step.name, self._bytes[at]),
            (None, self._bytes[at]),
        ):
            if key in self._done:
                return self._spent[key] / self._done[key] * amount
        return 0.0


def _name_and_shapes(step: ProgramStep) -> Hashable:
    return step.name, tuple(view.shape for view in (*tensor_views(step.values), *step.results))
