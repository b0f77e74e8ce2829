"""Detects exceptions that a signal handler of the job raises while the collector's code runs in the same thread."""

from __future__ import annotations

import signal
import traceback
from types import CodeType
from typing import Any


def is_raised_by_handler(error: BaseException) -> bool:
    """Return whether a Python signal handler that is currently installed raised the exception."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """Return the code object of a function, method, partial or callable object; None for anything else."""
    handler = getattr(handler, "func", handler)  # functools.partial
    for function in (handler, getattr(handler, "__func__", None), getattr(type(handler), "__call__", None)):  # noqa: B004
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            return code
    return None
