"""Runs a command as our child, which we outlive."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any


def run_command(
    command: Sequence[str], environment: Mapping[str, str], on_usr2: Callable[[], None] | None = None
) -> int:
    """The exit status of `command`, 128 + n for signal n. Raises OSError where it cannot be started.

    A terminal's Ctrl-C reaches it directly, other signals through us; but `on_usr2` is called at SIGUSR2, where it is
    given, and may fail with an OSError.
    """
    process = subprocess.Popen(list(command), env=environment)
    with _forward_signals(process, on_usr2):
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _forward_signals(process: subprocess.Popen[bytes], on_usr2: Callable[[], None] | None) -> Iterator[None]:
    def forward(number: int, _frame: Any) -> None:
        if number == signal.SIGUSR2 and on_usr2 is not None:
            with suppress(OSError):
                on_usr2()
        elif not (number == signal.SIGINT and _in_foreground()):
            process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, forward) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
