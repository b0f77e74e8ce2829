"""What the commands under other tools' names have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable

from etloom.errors import EtloomError


def told(command: str, work: Callable[[], None]) -> int:
    """Exit status 0, or 1 with the error in one line on stderr."""
    try:
        work()
    except EtloomError as error:
        sys.stderr.write(f"{command}: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{command}: {error.filename or ''}: {error.strerror or error}\n")
        return 1
    return 0
