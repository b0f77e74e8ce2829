"""A recording window that records nothing, for tests of the recorder's schedule."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from etloom.collector.options import RecordingOptions


class FakeWindow:
    """Replaces the real window; ``done`` lists the calls it received."""

    done: list[tuple[str, Any]] = []
    gate: threading.Event | None = None

    def __init__(self, options: RecordingOptions) -> None:
        self.options, self.started, self.steps, self.warnings = options, False, [], []
        self.ring_overwrote = False

    def can_start(self) -> bool:
        return True

    def prepare(self) -> None:
        self.done.append(("prepare", Path(self.options.out).name))

    def start(self) -> None:
        self.started = True

    def begin_step(self, number: int) -> None:
        self.open = number

    def end_step(self) -> None:
        self.steps.append(self.open)

    def stop(self) -> None:
        self.done.append(("stop", self.steps))

    def wait_for_device(self) -> bool:
        return True

    def abandon(self) -> None:
        self.done.append(("abandon", self.steps))

    def write(self, warnings: list[str]) -> list[str]:
        if self.gate is not None:
            assert self.gate.wait(120)
        if Path(self.options.out).name == "step_20":
            raise OSError(28, "No space left on device")
        self.done.append(("write", self.steps))
        return []
