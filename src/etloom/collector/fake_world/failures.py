"""States in one line why a script on fake tensors failed: its own line, the operator, the reason, what to do."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_MAX_LENGTH = 300
_SHAPE = "give it a shape function (register_fake), or replace it for the recording"
_KERNEL = "it needs data: make the kernel an operator (custom_op) with a shape function (register_fake)"
_REMEDIES = (
    (
        (
            "Unsupported operator",
            "not implemented for",
            "Could not run",
            "no fake impl",
            "fake implementation",
        ),
        _SHAPE,
    ),
    (("data pointer", "data_ptr", "Triton", "triton"), _KERNEL),
)
_OPERATOR = "_etloom_operator"


def note_operator(error: BaseException, name: str) -> None:
    """Note the operator that raised an exception on the exception itself, which keeps no tensor alive."""
    if not hasattr(error, _OPERATOR):
        with suppress(AttributeError):
            setattr(error, _OPERATOR, name)


def report_to(path: Path) -> None:
    """Write the reason into a file when an exception ends the script; its traceback is printed as usual."""
    process, before = os.getpid(), sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == process:
            path.write_text(describe_failure(trace, *_find_operator(error)), encoding="utf-8")
        before(kind, error, trace)

    sys.excepthook = report


def describe_failure(trace: TracebackType | None, error: BaseException, operator: str) -> str:
    """Return the place in the script, the operator, the first line of the message, and what to do."""
    message = (str(error).strip().splitlines() or [""])[0].partition(". This could be")[0][:_MAX_LENGTH]
    parts = [
        _find_place(trace),
        operator,
        f"{type(error).__name__}: {message}" if message else type(error).__name__,
    ]
    text = ": ".join(part for part in parts if part)
    for words, remedy in _REMEDIES:
        if operator and any(word in f"{type(error).__name__} {error}" for word in words):
            return f"{text}; {remedy}"
    return text


def _find_place(trace: TracebackType | None) -> str:
    """Return file and line of the innermost call that is neither in an installed package nor in the collector."""
    place = ""
    for frame in traceback.extract_tb(trace):
        is_installed = "site-packages" in frame.filename or frame.filename.startswith((sys.base_prefix, "<"))
        if not is_installed and Path(__file__).parent != Path(frame.filename).parent:
            place = f"{Path(frame.filename).name}:{frame.lineno}"
    return place


def _find_operator(error: BaseException) -> tuple[BaseException, str]:
    """Return the exception of the operator that caused an exception, and the operator's name; "" for none."""
    cause: BaseException | None = error
    while cause is not None:
        if name := getattr(cause, _OPERATOR, ""):
            return cause, name
        cause = cause.__cause__ or cause.__context__
    return error, ""
