"""The exceptions that etloom raises for a user's mistakes and for unusable input.

EtloomError            exit status 1 (2 if caused by an `option`), one line: what is wrong, where, what to do
├── ReadError          a file is missing, unreadable, or not a trace
├── LimitError         an input exceeds a stated bound (a gzip bomb, a nesting depth)
├── LinkError          the traces are not of one program, so pairing them would be wrong
├── AnalysisError      the trace cannot answer the question (no steps, no GPU activity)
│   └── UnknownRank    the run does not hold a rank; also an InvalidValue
├── InvalidValue       an argument is wrong whatever the files hold; also a ValueError
│   └── UnknownName    unknown reader, analysis, export, table or column
├── CollectError       collection cannot start
│   └── InvalidOption  an option of collect or record is wrong; also an InvalidValue
└── DataLoss           --strict, and the stats table has a row of severity data_loss or error
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from etloom.core.urls import describe_path, redact


class EtloomError(Exception):
    """An error as one line: what is wrong, where, and what to do.

    Args:
        what: The problem, with the wrong value.
        where: The file, rank or module.
        remedy: The next step for the user.
        option: The parameter whose value is wrong whatever the files hold, as Python calls it (max_bytes). A command
            prints it as its flag and exits with the status of wrong usage.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | PathLike[str] | None = None,
        remedy: str | None = None,
        option: str | None = None,
    ) -> None:
        self.what = redact(what)
        self.where = None if where is None else describe_path(where)
        self.remedy = None if remedy is None else redact(remedy)
        self.option = option
        line = ": ".join(part for part in (self.where, option, self.what) if part is not None)
        if self.remedy:
            line = f"{line}; {self.remedy}"
        super().__init__(" ".join(line.split()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling between processes: by default, unpickling would pass only the message to __init__."""
        return _restore_error, (type(self), self.args, self.__dict__)


def _restore_error(kind: type[EtloomError], args: tuple[Any, ...], state: dict[str, Any]) -> EtloomError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class EtloomWarning(UserWarning):
    """Warns that a result is incomplete, for example because an analysis failed for some ranks."""


def warn(message: str) -> None:
    """Issue an EtloomWarning that points to the caller's line outside etloom; the command line prints only the text."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "etloom":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, EtloomWarning, stacklevel=level)


class ReadError(EtloomError):
    pass


class LimitError(EtloomError):
    pass


class LinkError(EtloomError):
    pass


class AnalysisError(EtloomError):
    pass


class CollectError(EtloomError):
    pass


class DataLoss(EtloomError):
    pass


class InvalidValue(EtloomError, ValueError):
    """The value of an argument is wrong, independently of the content of the files."""


class UnknownRank(AnalysisError, InvalidValue):
    pass


class InvalidOption(CollectError, InvalidValue):
    pass


class UnknownName(InvalidValue):
    """A name is not registered; the remedy is the most similar known name, and for an option all known names.

    ``synonyms``: name that other tools use -> the known name, which then is the nearest.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        *,
        option: str | None = None,
        synonyms: Mapping[str, str] | None = None,
    ) -> None:
        known = list(known) if option else sorted(known)
        synonym = (synonyms or {}).get(name)
        near = [synonym] if synonym else difflib.get_close_matches(name, known, n=1)
        self.nearest = near[0] if near else None
        expected = f"expected one of {', '.join(known)}"
        remedy = f"did you mean {near[0]!r}?" if near else expected
        if near and option:
            remedy += f" ({expected})"
        super().__init__(f"unknown {kind} {name!r}", remedy=remedy, option=option)
