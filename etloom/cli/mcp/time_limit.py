"""A time limit for work that cannot be interrupted, such as a query of polars."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from etloom.core.errors import LimitError

_Result = TypeVar("_Result")


class TimeLimit:
    """Runs functions in a thread, and stops waiting for a function after a number of seconds.

    Polars has no way to end a query that runs. It continues without a reader, and until it ends no other one starts,
    so that at most one thread works in vain.

    Args:
        seconds: time after which the caller gets an error.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running = threading.Lock()

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Return the result of ``function()`` or raise its error, within the time limit.

        Raises:
            LimitError: it takes longer, or an earlier function still runs.
        """
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                outcome["result"] = function()
            except BaseException as error:
                outcome["error"] = error
            finally:
                self._running.release()

        if not self._running.acquire(timeout=self.seconds):
            raise LimitError("an earlier query still runs", remedy="wait, or restart the server")
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.seconds)
        if thread.is_alive():
            raise LimitError(
                f"the query takes longer than {self.seconds:g} s",
                remedy="narrow it: add a WHERE, avoid cross joins",
            )
        if "error" in outcome:
            raise outcome["error"]
        result: _Result = outcome["result"]
        return result
