"""Arguments of the verbs: the check of keywords, paths that are opened."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from etloom.core.errors import EtloomError
from etloom.core.plugin_options import unknown_options_error
from etloom.core.trace import Job, Trace

StrPath = str | os.PathLike[str]
Run = Trace | Job | str | os.PathLike[str]
"""A run as the verbs take it: a Trace, a Job, or a path that is opened."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def verb(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a public verb: a keyword that it does not have raises EtloomError with the nearest one it has."""
    parameters = inspect.signature(function).parameters.values()
    known = [item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)]
    accepts_any = any(item.kind is item.VAR_KEYWORD for item in parameters)

    @functools.wraps(function)
    def call(*args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        if not accepts_any and (unknown := sorted(keywords.keys() - known)):
            raise unknown_options_error(f"etloom.{function.__name__}", unknown, known)
        return function(*args, **keywords)

    return call


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
        raise EtloomError(f"expected a Trace, a Job or a path, got {type(run).__name__}", remedy=remedy)
    if isinstance(run, Job) and not run:
        raise EtloomError("the Job has no ranks", remedy=remedy)
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
