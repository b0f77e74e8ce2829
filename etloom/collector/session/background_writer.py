"""Writes what a window recorded beside the training, one window at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

_TIMEOUT_S = 300.0


class BackgroundWriter:
    """One thread at most; the memory of the host so holds the traces of one window beside the one that is open."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Do `work`, which raises nothing, in the background; or here, where Python is ending already."""
        thread = threading.Thread(target=work, name="etloom-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            work()
        else:
            self._thread = thread

    def wait(self, timeout_s: float = _TIMEOUT_S) -> bool:
        """False where the disk has not taken the traces by then."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def forget(self) -> None:
        """In a child of fork, which has no such thread."""
        self._thread = None
