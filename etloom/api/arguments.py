"""Arguments of the verbs: the check of keywords, paths that are opened, options of plugins."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_args

from etloom.core import registry
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace

StrPath = str | os.PathLike[str]
Run = Trace | Job | str | os.PathLike[str]
"""A run as the verbs take it: a Trace, a Job, or a path that is opened."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_ACCEPTED: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (Integral,)),
    float: ("a number", (Real,)),
    str: ("a string", (str,)),
    bool: ("True or False", (bool,)),
    NoneType: ("None", (NoneType,)),
}
"""Type of an option -> its name in messages, and the types that are accepted for it."""


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


def unknown_options_error(owner: str, unknown: Iterable[str], known: Iterable[str]) -> EtloomError:
    """Return the error for keywords that a verb or plugin does not have."""
    unknown, known = list(unknown), list(known)
    near = difflib.get_close_matches(unknown[0], known, n=1)
    if not known:
        remedy = "it has no options"
    elif near and len(unknown) == 1:
        remedy = f"did you mean {near[0]!r}?"
    else:
        remedy = f"its options: {', '.join(known)}"
    plural = "s" * (len(unknown) > 1)
    return EtloomError(f"{owner} has no option{plural} {', '.join(map(repr, unknown))}", remedy=remedy)


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


def check_options(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Check the options of a plugin.

    Args:
        kind: "analyses" or "exports".
        name: of the plugin.
        options: name -> value.

    Raises:
        EtloomError: the plugin has no such option, or the value has the wrong type.
    """
    if not options:
        return
    owner = f"the {'analysis' if kind == 'analyses' else 'format'} {name!r}"
    known = {option.name: option for option in registry.list_options(kind, name)}
    if unknown := sorted(set(options) - set(known)):
        raise unknown_options_error(owner, unknown, known)
    for option, value in options.items():
        _check_value(owner, known[option], value)


def _check_value(owner: str, option: registry.Option, value: Any) -> None:
    types = get_args(option.type) or (option.type,)
    if not all(kind in _ACCEPTED for kind in types):
        return  # a type that only the plugin can check
    accepted = tuple(kind for declared in types for kind in _ACCEPTED[declared][1])
    if isinstance(value, Integral) and abs(int(value)) >= 1 << 63:
        raise EtloomError(
            f"the option {option.name!r} of {owner} is too large", remedy="it must fit in 64 bits"
        )
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        expected = " or ".join(_ACCEPTED[kind][0] for kind in types)
        raise EtloomError(
            f"the option {option.name!r} of {owner}: expected {expected}, got {value!r:.60}",
            remedy=f"its default is {option.default!r}",
        )


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
