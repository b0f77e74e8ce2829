"""Records which collective a call of ``Work.wait`` waited for: torch does not record these calls.

After each wait, an operator ``c10d::wait`` is recorded whose inputs are the tensors of the collective, so that the
execution trace states what needed its result even if it had ended long before. DDP waits in C++ and is not covered.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

NAME = "c10d::wait"


class WorkWaits:
    """Replaces ``Work.wait`` of torch.distributed between `start` and `stop`. ``count``: operators recorded."""

    def __init__(self) -> None:
        self.count = 0
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None
        self._record_operator: Callable[..., None] | None = None

    def start(self) -> None:
        """Replace ``Work.wait``, if the job has imported torch.distributed."""
        work_class = _find_work_class()
        try:
            from torch._C._autograd import _record_function_with_args_enter, _record_function_with_args_exit
        except ImportError:  # another version of torch
            return
        if work_class is None:
            return
        self._record_operator = lambda *tensors: _record_function_with_args_exit(
            _record_function_with_args_enter(NAME, *tensors)
        )
        original = self._original = work_class.wait

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            self._record(work)
            return result

        work_class.wait = self._replacement = wait

    def stop(self) -> None:
        """Restore ``Work.wait``, unless somebody else has replaced it since."""
        work_class = _find_work_class()
        if self._replacement is not None and work_class.wait is self._replacement:
            work_class.wait = self._original
        self._replacement = None

    def _record(self, work: Any) -> None:
        if self._replacement is None or self._record_operator is None:
            return
        try:
            self._record_operator(*_list_tensors(work.get_future().value()))
        except Exception:  # not every backend has a future for every operation
            return
        self.count += 1


def _find_work_class() -> Any:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(c10d, "Work", None)


def _list_tensors(value: Any) -> list[Any]:
    """Return the tensors in a value of nested lists."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _list_tensors(item)]
    return [value] if hasattr(value, "untyped_storage") else []
