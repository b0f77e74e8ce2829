"""What becomes of an exception: one line on stderr and an exit status, never a traceback."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from etloom.core.errors import EtloomError

EXIT_USAGE = 2  # as click exits
EXIT_INTERNAL = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell says it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


def print_message(line: str) -> None:
    """A message to the user, on stderr."""
    print(f"etloom: {make_printable(line)}", file=sys.stderr)


def make_printable(text: str) -> str:
    """The text with control characters spelt out: a name from a trace must not steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@contextmanager
def handle_errors(**called: str) -> Iterator[None]:
    """Turn whatever is raised inside into a message and SystemExit. Also a decorator.

    An EtloomError of an `option` becomes wrong usage of the flag of that name. called: what others call a parameter of
    the verb -> how the verb does, where it is not the same.
    """
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has gone, as in `| head`; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_PIPE_CLOSED) from None
    except EtloomError as error:
        _print_traceback_if_debugging(error)
        if error.option is None:
            print_message(str(error))
            raise SystemExit(1) from None
        flag = _flag(called.get(error.option, error.option))
        told = ": ".join(filter(None, (flag, error.where, error.what)))
        print_message("; ".join(filter(None, (told, error.remedy, _help()))))
        raise SystemExit(EXIT_USAGE) from None
    except OSError as error:
        _print_traceback_if_debugging(error)
        where = f"{error.filename}: " if error.filename else ""
        print_message(f"{where}{error.strerror or error}")
        raise SystemExit(1) from None
    except BaseException as error:
        # Not Exception: a panic in polars is a BaseException.
        if type(error).__module__.startswith(("click.", "typer.")):
            if not hasattr(error, "format_message"):
                raise  # an exit, not an error
            raise SystemExit(_report_usage_error(error)) from None
        _print_traceback_if_debugging(error)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        print_message(
            f"this is a fault of etloom, not of the input: {what[:300]}; ETLOOM_DEBUG=1 shows where"
        )
        raise SystemExit(EXIT_INTERNAL) from None


@contextmanager
def as_usage_error(option: str = "") -> Iterator[None]:
    """What is raised inside is of the command line alone, whatever the run holds: wrong usage of the option, where it
    does not name one itself."""
    try:
        yield
    except EtloomError as error:
        error.option = error.option or option
        raise


def check_finite(value: float | None) -> float | None:
    """As the callback of an option: refuses nan and infinities, which the parser takes for numbers."""
    if value is not None and not math.isfinite(value):
        import typer

        raise typer.BadParameter(f"{value} is no number to reckon with")
    return value


def _report_usage_error(error: Any) -> int:
    """The exit status of wrong usage that the parser found, told in one line; a bare group shows its help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        line = _explain_extra_paths(error.format_message())
        if type(error).__name__ == "BadParameter":
            hint = error.param_hint if error.param is None else _spell(error.param)
            line = f"{hint}: {error.message}" if hint else error.message
        print_message(f"{' '.join(line.split()).rstrip('.')}; {_help(error.ctx)}".removesuffix("; "))
    return int(error.exit_code)


def _explain_extra_paths(line: str) -> str:
    """`run/*` names the files of a folder where the folder is wanted."""
    extra = re.search(r"unexpected extra argument.* \((.+)\)", line)
    if extra is None or not all(os.path.exists(word) for word in extra[1].split()):  # noqa: PTH110
        return line
    return "more than one path: name the folder that holds them"


def _flag(option: str) -> str:
    """A parameter of the command that runs as its user writes it; as it is, where the command has none of that name."""
    context = _context()
    parameters = context.command.params if context else ()
    return next((_spell(one) for one in parameters if one.name == option), option)


def _spell(parameter: Any) -> str:
    """The longest of its flags; of an argument what the help calls it."""
    flags = parameter.opts if parameter.param_type_name == "option" else [parameter.human_readable_name]
    return str(max(flags, key=len))


def _help(context: Any = None) -> str:
    """Where the command that runs says what it takes."""
    context = context or _context()
    return f"see {context.command_path} --help" if context else ""


def _context() -> Any:
    """What the parser knows of the command that runs, None where there is none."""
    typer = sys.modules.get("typer")
    if typer is None:
        return None
    # Typer's parser is click, of which its later versions hold a copy.
    parser = typer.Context.__mro__[1].__module__.rpartition(".")[0]
    return importlib.import_module(f"{parser}.globals").get_current_context(silent=True)


def _print_traceback_if_debugging(error: BaseException) -> None:
    if os.environ.get("ETLOOM_DEBUG"):
        import traceback

        traceback.print_exception(error)
