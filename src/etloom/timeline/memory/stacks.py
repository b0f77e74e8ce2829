"""The stacks of requests: which line, module or operator of the program made them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

PYTHON = re.compile(r"\.py:\d+\)$|<(?:string|stdin|ipython[^>]*)>:\d+\)$")
BACKWARD = re.compile(r"\b(\w*Backward\w*)::apply\b")
_OPERATOR = re.compile(r"\b(at::_ops::\w+)::")
"""Match the frames of C++ of a backward node and of an operator."""
TORCH = re.compile(r"[(/]torch/[^ ]*\.py:\d+\)$")


def find_line(stack: list[str]) -> str | None:
    """Return a stack's innermost Python frame outside of torch, else its innermost Python frame, else the backward node
    or the operator that allocated; None if it has none of them.

    The innermost frames of C++ are those that gather the stack and allocate: they say nothing about the program.
    """
    python = [frame for frame in stack if PYTHON.search(frame)]
    user = [frame for frame in python if not TORCH.search(frame)]
    # A stack without a frame of C++ names its places itself.
    other = [] if any("::" in frame for frame in stack) else stack
    operator = find_operator(stack)
    return next(iter([*user, *python, *([operator] if operator else []), *other]), None)


def find_operator(stack: list[str]) -> str | None:
    """Return the backward node or else the operator of a stack; None if C++ was not recorded."""
    native = [match[1] for p in (BACKWARD, _OPERATOR) for frame in stack if (match := p.search(frame))]
    return native[0] if native else None


def find_module(stack: list[str]) -> str | None:
    """Return the innermost module that the stack names, or else the innermost ``forward``, if possible outside of
    torch, or else the function of `find_line` (the optimizer's ``step``, a loss), both with their files; without Python
    frames the backward node or operator."""
    if named := [match for frame in stack if (match := _MODULE.match(frame))]:
        return f"{named[0][1]} ({named[0][2]})".lstrip()
    forward = [frame for frame in stack if frame.startswith("forward (")]
    user = [frame for frame in forward if not TORCH.search(frame)]
    place = next(iter([*user, *forward]), find_line(stack))
    return None if place is None else re.sub(r":\d+\)$", ")", place)


PLACES: dict[str, Callable[[list[str]], str | None]] = {
    "line": find_line,
    "module": find_module,
    "operator": find_operator,
}


class ModuleCall(NamedTuple):
    """The part of a stack inside of a call of a module.

    ``entry``: the frame of the module's forward, or the module's name. ``inner``: the frames inside of the call.
    ``is_named``: calls of different modules differ in ``entry``.
    """

    entry: str
    inner: tuple[str, ...]
    is_named: bool


def find_call(stack: list[str], module: str) -> ModuleCall | None:
    """Return the outermost call of a module in a stack, None if the stack has none.

    Args:
        stack: Frames, innermost first.
        module: The line that calls the module (model.py:12), or, if the frames name modules, a class or a name.
    """
    for place in reversed(range(len(stack))):
        if (match := _MODULE.match(stack[place])) and module in match.groups():
            return ModuleCall(match[1], tuple(stack[:place]), is_named=True)
        if stack[place].endswith((f"({module})", f"/{module})")):
            inner = [frame for frame in stack[:place] if PYTHON.search(frame) and not _CALL.match(frame)]
            if inner and inner[-1].startswith("forward ("):
                return ModuleCall(inner[-1], tuple(inner), is_named=False)
    return None


def list_calls(stack: list[str]) -> list[str]:
    """Return the lines of a stack that call a module, with their files' names only, and the classes of modules."""
    classes = [match[2] for frame in stack if (match := _MODULE.match(frame))]
    python = [frame for frame in stack if PYTHON.search(frame) and not _CALL.match(frame)]
    lines = [
        caller.rpartition("(")[2].rpartition("/")[2].rstrip(")")
        for called, caller in itertools.pairwise(python)
        if called.startswith("forward (")
    ]
    return [*classes, *lines]


def is_backward(stack: list[str]) -> bool:
    """Return whether a request belongs to a backward pass: it names a node, or its thread runs no Python."""
    return not any(map(PYTHON.search, stack)) or any(map(BACKWARD.search, stack))


_CALL = re.compile(r"(?:_call_impl|_wrapped_call_impl|new_forward) \(")
_MODULE = re.compile(r"module (.*) \((\w+):0\)$")
"""The frame that the forecast without a GPU adds for a module: its name and class."""
