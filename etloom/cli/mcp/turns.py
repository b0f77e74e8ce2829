"""Lets questions of agents run before the computation of likely answers in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Makes the background preparation of answers wait while questions are answered."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions = 0
        self._threads = threading.local()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a question as open in this context, unless the thread prepares answers in the background."""
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
        """Mark the work of this thread in this context as background preparation, which waits for questions."""
        self._threads.is_preparing = True
        try:
            yield
        finally:
            self._threads.is_preparing = False

    def give_way(self) -> None:
        """In a thread that prepares answers, wait until no question is open; hold no lock that a question may need."""
        if self._is_preparing():
            with self._changed:
                self._changed.wait_for(lambda: not self._questions)

    def _is_preparing(self) -> bool:
        return getattr(self._threads, "is_preparing", False)
