"""Converts exceptions of a command to one line on stderr and an exit status, without a traceback."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from etloom.core.errors import EtloomError, EtloomWarning
from etloom.core.urls import redact

EXIT_USAGE = 2  # as click exits
EXIT_INTERNAL = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


def print_message(line: str) -> None:
    """Print a message to the user on stderr."""
    print(f"etloom: {make_printable(redact(line))}", file=sys.stderr)


def make_printable(text: str) -> str:
    """Escape control characters in a text, because a name from a trace must not control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@contextmanager
def handle_errors(**renamed: str) -> Iterator[None]:
    """Turn any exception raised inside into a message and SystemExit; also usable as a decorator.

    An EtloomError about an `option` is reported as wrong usage of the flag of that name.

    Args:
        renamed: parameters that a lower level calls differently, mapped to the command's own name.
    """
    try:
        with print_warnings():
            yield
    except (SystemExit, GeneratorExit, click.exceptions.Exit):
        raise
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output is gone, as in `| head`; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_PIPE_CLOSED) from None
    except click.Abort:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except click.ClickException as error:
        raise SystemExit(_report_usage_error(error)) from None
    except EtloomError as error:
        _print_traceback_if_debugging(error)
        raise SystemExit(_report_error(error, renamed)) from None
    except OSError as error:
        _print_traceback_if_debugging(error)
        where = f"{error.filename}: " if error.filename else ""
        print_message(f"{where}{error.strerror or error}")
        raise SystemExit(1) from None
    except BaseException as error:
        # Not Exception: a panic in polars is a BaseException.
        _print_traceback_if_debugging(error)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print_message(
            f"internal error, not caused by the input: {reason[:300]}; ETLOOM_DEBUG=1 prints a traceback"
        )
        raise SystemExit(EXIT_INTERNAL) from None


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print each EtloomWarning raised in this context as a message on stderr; show other warnings as Python does."""
    show = warnings.showwarning

    def print_warning(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if issubclass(category, EtloomWarning):
            print_message(f"warning: {message}")
        else:
            show(message, category, *place, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("always", EtloomWarning)
        warnings.showwarning = print_warning  # type: ignore[assignment]
        yield


@contextmanager
def as_usage_error(option: str = "") -> Iterator[None]:
    """Report an EtloomError raised in this context as wrong usage of `option`, unless the error names another option.

    For checks of the command line alone, which no content of the run can make valid.
    """
    try:
        yield
    except EtloomError as error:
        error.option = error.option or option
        raise


def _report_error(error: EtloomError, renamed: dict[str, str]) -> int:
    if error.option is None:
        print_message(str(error))
        return 1
    flag = _find_flag(renamed.get(error.option, error.option))
    text = ": ".join(filter(None, (flag, error.where, error.what)))
    print_message("; ".join(filter(None, (text, error.remedy, _refer_to_help()))))
    return EXIT_USAGE


def _report_usage_error(error: click.ClickException) -> int:
    """Print a usage error of click as one line, or help if a group is called without a command; return the status."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
    else:
        line = _explain_extra_paths(error.format_message())
        if type(error) is click.BadParameter:
            flag = error.param_hint if error.param is None else _spell(error.param)
            line = f"{flag}: {error.message}" if flag else error.message
        print_message(f"{' '.join(line.split()).rstrip('.')}; {_refer_to_help(context)}".removesuffix("; "))
    return int(error.exit_code)


def _explain_extra_paths(line: str) -> str:
    """Replace click's error about extra path arguments, as from `run/*`, by a request to name the folder instead."""
    extra = re.search(r"unexpected extra argument.* \((.+)\)", line)
    if extra is None or not all(os.path.exists(word) for word in extra[1].split()):  # noqa: PTH110
        return line
    return "more than one path: name the folder that contains them"


def _find_flag(option: str) -> str:
    """Return the flag of the running command's parameter named `option`, or `option` if there is no such parameter."""
    context = click.get_current_context(silent=True)
    parameters = context.command.params if context else ()
    return next((_spell(param) for param in parameters if param.name == option), option)


def _spell(parameter: click.Parameter) -> str:
    """Return the longest flag of an option, or the name of an argument as shown in the help."""
    flags = parameter.opts if isinstance(parameter, click.Option) else [parameter.human_readable_name]
    return str(max(flags, key=len))


def _refer_to_help(context: Any = None) -> str:
    """Return "see COMMAND --help" for the running command."""
    context = context or click.get_current_context(silent=True)
    return f"see {context.command_path} --help" if context else ""


def _print_traceback_if_debugging(error: BaseException) -> None:
    if os.environ.get("ETLOOM_DEBUG"):
        import traceback

        traceback.print_exception(error)
