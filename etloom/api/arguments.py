"""What the verbs are given: whether it is a run, and the options of plugins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

from etloom.core import registry
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace

_VALUES: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (Integral,)),
    float: ("a number", (Real,)),
    str: ("a text", (str,)),
    bool: ("True or False", (bool,)),
    NoneType: ("None", (NoneType,)),
}
"""Type of an option -> how a message calls it, and what is taken for it."""


def check_run(given: object) -> None:
    """Raise EtloomError for what is neither Trace nor Job, or a Job of no ranks."""
    if not isinstance(given, (Trace, Job)):
        path = isinstance(given, (str, os.PathLike))
        raise EtloomError(
            f"a Trace or a Job is needed, not {f'the path {str(given)!r}' if path else type(given).__name__}",
            remedy="etloom.open(path) gives the Job of what is there",
        )
    if isinstance(given, Job) and not given:
        raise EtloomError("the Job holds no rank", remedy="etloom.open(path) gives the Job of what is there")


def as_job(run: Trace | Job) -> Job:
    """A run as a Job. Raises EtloomError for what is neither Trace nor Job."""
    check_run(run)
    return run if isinstance(run, Job) else Job({run.rank or 0: run})


def check_options(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise EtloomError for an option that a plugin does not have, or of another type."""
    if not options:
        return
    called = f"the {'analysis' if kind == 'analyses' else 'format'} {name!r}"
    known = {option.name: option for option in registry.list_options(kind, name)}
    if unknown := sorted(set(options) - set(known)):
        raise EtloomError(
            f"{called} has no option {', '.join(map(repr, unknown))}",
            remedy=f"its options: {', '.join(known)}" if known else "it has none",
        )
    for given, value in options.items():
        types = get_args(known[given].type) or (known[given].type,)
        words = [_VALUES[one][0] for one in types if one in _VALUES]
        kinds = tuple(kind for one in types if one in _VALUES for kind in _VALUES[one][1])
        if len(words) < len(types):
            continue  # of a type that only the plugin can judge
        if isinstance(value, Integral) and abs(int(value)) >= 1 << 63:
            raise EtloomError(f"the option {given!r} of {called} is too large", remedy="64 bits must hold it")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise EtloomError(
                f"the option {given!r} of {called} is {' or '.join(words)}, not {value!r:.60}",
                remedy=f"its default is {known[given].default!r}",
            )
