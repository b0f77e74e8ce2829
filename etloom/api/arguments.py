"""Arguments of the verbs: the check of keywords, paths that are opened."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.paths import expand_home
from etloom.core.registry import unknown_options_error
from etloom.core.trace import Job, Trace

StrPath = str | os.PathLike[str]
Run = Trace | Job | str | os.PathLike[str]
"""A run as the verbs take it: a Trace, a Job, or a path that is opened."""
_PATH_TYPE = re.compile(r"\b(?:StrPath|Run)\b")
"""Matches the annotation of an argument that is, or may be, a path."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def verb(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a public verb.

    A keyword that it does not have raises EtloomError with the nearest one it has. Paths may begin with ``~``.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    paths = [item.name for item in parameters if _PATH_TYPE.search(str(item.annotation))]
    known = [item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)]
    accepts_any = any(item.kind is item.VAR_KEYWORD for item in parameters)

    @functools.wraps(function)
    def call(*args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        if not accepts_any and (unknown := sorted(keywords.keys() - known)):
            raise unknown_options_error(f"etloom.{function.__name__}", unknown, known)
        bound = signature.bind(*args, **keywords)
        for name in paths:
            if name in bound.arguments:
                bound.arguments[name] = _expand_paths(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


def _expand_paths(value: Any) -> Any:
    """Return a path, or a mapping or sequence of paths, with ``~`` expanded; anything else as it is."""
    if isinstance(value, (str, os.PathLike)):
        return expand_home(value) if os.fspath(value).startswith("~") else value
    if isinstance(value, dict):
        return {key: _expand_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_expand_paths(item) for item in value)
    return value


def as_run(run: Run) -> Trace | Job:
    """Return a run as it is, or open the path.

    Raises:
        EtloomError: it is neither Trace, Job nor path, or a Job without ranks.
        ReadError: the path cannot be read.
    """
    if isinstance(run, (str, os.PathLike)):
        from etloom.api.runs import open

        return open(run)
    remedy = "etloom.open(path) returns the Job of a folder or file"
    if not isinstance(run, (Trace, Job)):
        raise InvalidValue(f"expected a Trace, a Job or a path, got {type(run).__name__}", remedy=remedy)
    if isinstance(run, Job) and not run:
        raise InvalidValue("the Job has no ranks", remedy=remedy)
    return run


def as_job(run: Run) -> Job:
    """Return a run as a Job; a path is opened. Raises like `as_run`."""
    run = as_run(run)
    return run if isinstance(run, Job) else Job({run.rank or 0: run})


def as_collection(value: Any) -> Any:
    """Return one value or several as a collection; None as an empty one."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (str, int)) else value


def as_paths(value: Any) -> list[Path]:
    """Return one path or several as a list."""
    return [Path(value)] if isinstance(value, (str, os.PathLike)) else [Path(file) for file in value]


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Create the folder of the target, and raise EtloomError with its name if the system refuses to write it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=target, remedy="choose another path"
        ) from error
