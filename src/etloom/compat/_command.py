"""Exit status and error output of the commands that have the names of other tools."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from etloom.core.errors import EtloomError


def run_command(command: str, work: Callable[[], None]) -> int:
    """Run ``work`` and return its exit status: 0; 1 for an error, printed to stderr; 128 + SIGINT or SIGPIPE."""
    try:
        work()
    except KeyboardInterrupt as interrupt:
        if str(interrupt):
            sys.stderr.write(f"{command}: {interrupt}\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, which not every system has
    except EtloomError as error:
        sys.stderr.write(f"{command}: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{command}: {error.filename or ''}: {error.strerror or error}\n")
        return 1
    return 0
