"""Runs a command as a child process and forwards signals to it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    on_usr2: Callable[[], None] | None = None,
    received: list[int] | None = None,
) -> int:
    """Run `command` and return its exit status, 128 + n if signal n ended it.

    A terminal's Ctrl-C reaches the command directly; other signals are forwarded to it. If `on_usr2` is set, SIGUSR2
    calls it instead; it may raise OSError. The numbers of the other signals are added to `received`.

    Raises:
        OSError: The command cannot be started.
    """
    received = [] if received is None else received
    started: list[subprocess.Popen[bytes]] = []
    with _forward_signals(started, received, on_usr2):
        process = subprocess.Popen(list(command), env=environment)
        started.append(process)
        for number in received:  # before it was known
            _forward(process, number)
        status = process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _forward_signals(
    started: Sequence[subprocess.Popen[bytes]], received: list[int], on_usr2: Callable[[], None] | None
) -> Iterator[None]:
    def forward(number: int, _frame: Any) -> None:
        if number == signal.SIGUSR2 and on_usr2 is not None:
            with suppress(OSError):
                on_usr2()
            return
        received.append(number)
        for process in started:
            _forward(process, number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    forwarded = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    previous = {number: signal.signal(number, forward) for number in forwarded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _forward(process: subprocess.Popen[bytes], number: int) -> None:
    if not (number == signal.SIGINT and _is_in_foreground()):
        process.send_signal(number)


def _is_in_foreground() -> bool:
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
