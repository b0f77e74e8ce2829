"""Writes the traces of a window in the background, one window at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

_TIMEOUT_S = 300.0


class BackgroundWriter:
    """Writes traces in at most one thread, so memory holds at most one finished window next to the open window."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, in a background thread; if Python is exiting, run it in this thread."""
        thread = threading.Thread(target=work, name="etloom-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            work()
        else:
            self._thread = thread

    def wait(self, timeout_s: float = _TIMEOUT_S) -> bool:
        """Wait until the background thread has written its traces; return False after `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def reset_after_fork(self) -> None:
        """Forget the background thread, which does not exist in a forked child."""
        self._thread = None
