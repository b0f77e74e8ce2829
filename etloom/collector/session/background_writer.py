"""Writes the traces of a window in the background, one window at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

_TIMEOUT_S = 300.0


class BackgroundWriter:
    """Runs at most one thread, so host memory holds the traces of at most one window besides the open one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, in the background; in this thread if Python is already ending."""
        thread = threading.Thread(target=work, name="etloom-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            work()
        else:
            self._thread = thread

    def wait(self, timeout_s: float = _TIMEOUT_S) -> bool:
        """Wait until the traces are written; return False if that takes longer than `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def reset_after_fork(self) -> None:
        """Forget the thread, which a child of fork does not have."""
        self._thread = None
