"""The order of questions and preparation: a question goes first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Makes preparation in the background wait while questions are answered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions = 0
        self._threads = threading.local()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a question until its answer is complete; one of preparation itself does not count."""
        if self._is_preparing():
            yield
            return
        with self._changed:
            self._questions += 1
        try:
            yield
        finally:
            with self._changed:
                self._questions -= 1
                self._changed.notify_all()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Mark what the thread does as preparation."""
        self._threads.is_preparing = True
        try:
            yield
        finally:
            self._threads.is_preparing = False

    def give_way(self) -> None:
        """Wait until no question is left if the thread prepares; it must not hold what a question may wait for."""
        if self._is_preparing():
            with self._changed:
                self._changed.wait_for(lambda: not self._questions)

    def _is_preparing(self) -> bool:
        return getattr(self._threads, "is_preparing", False)
