"""Gives agents' questions priority over the computation of likely answers in the background."""

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
        """Count an agent's question as open while the block runs, unless this thread prepares answers."""
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
        """Mark this thread as a background preparer, which waits for agents' questions, while the block runs."""
        self._threads.is_preparing = True
        try:
            yield
        finally:
            self._threads.is_preparing = False

    def give_way(self) -> None:
        """In a background thread, wait until no question is open; the caller must hold no lock that questions need."""
        if self._is_preparing():
            with self._changed:
                self._changed.wait_for(lambda: not self._questions)

    def _is_preparing(self) -> bool:
        return getattr(self._threads, "is_preparing", False)
