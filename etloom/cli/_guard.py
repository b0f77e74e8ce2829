"""What becomes of an exception: one line on stderr and an exit status, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from etloom.errors import EtloomError

INTERNAL = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as a shell says it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def say(line: str) -> None:
    """A message to the user, on stderr."""
    print(f"etloom: {printable(line)}", file=sys.stderr)


def printable(text: str) -> str:
    """The text with control characters spelt out: a name from a trace must not steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@contextmanager
def guarded() -> Iterator[None]:
    """Turn whatever is raised inside into a message and SystemExit. Also a decorator."""
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has gone, as in `| head`; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(PIPE_CLOSED) from None
    except EtloomError as error:
        _traceback_if_asked(error)
        say(str(error))
        raise SystemExit(1) from None
    except OSError as error:
        _traceback_if_asked(error)
        where = f"{error.filename}: " if error.filename else ""
        say(f"{where}{error.strerror or error}")
        raise SystemExit(1) from None
    except BaseException as error:
        # Not Exception: a panic in polars is a BaseException.
        if type(error).__module__.startswith(("click.", "typer.")):
            if not hasattr(error, "format_message"):
                raise  # an exit, not an error
            raise SystemExit(_misused(error)) from None
        _traceback_if_asked(error)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        say(f"this is a fault of etloom, not of the input: {what[:300]}; ETLOOM_DEBUG=1 shows where")
        raise SystemExit(INTERNAL) from None


@contextmanager
def usage() -> Iterator[None]:
    """What is raised inside of a command line alone, whatever the run holds, is wrong usage: exit status 2."""
    try:
        yield
    except EtloomError as error:
        import typer

        raise typer.BadParameter(str(error)) from error


def _misused(error: Any) -> int:
    """The exit status of wrong usage, told in one line; a bare group shows its help instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        command = f" ({error.ctx.command_path} -h shows how)" if getattr(error, "ctx", None) else ""
        line = " ".join(error.format_message().split())
        say(line.removeprefix("Invalid value: ").rstrip(".") + command)
    return int(error.exit_code)


def _traceback_if_asked(error: BaseException) -> None:
    if os.environ.get("ETLOOM_DEBUG"):
        import traceback

        traceback.print_exception(error)
