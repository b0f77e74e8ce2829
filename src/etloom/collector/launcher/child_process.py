"""Runs a command, under `nsys profile` if asked, as a child process, and forwards signals to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from ..text import format_ranks


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


# Inserts `nsys profile` before the program of each rank in the command of a job.
#
# nsys and Kineto both use CUPTI, so a window is recorded by one or the other. The report covers the time between
# cudaProfilerStart and cudaProfilerStop, which the window calls (session/nsys_capture.py).
# https://docs.nvidia.com/nsight-systems/UserGuide/index.html#cli-profile-command-switch-options

_SWITCHES = (
    "profile",
    "--trace=cuda,nvtx,osrt",
    "--sample=none",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--force-overwrite=true",
    "--kill=none",
)
# Launchers that start a Python for each rank, with the switch that makes them run the program itself instead.
_NO_PYTHON = {"torchrun": "--no-python", "accelerate": "--no_python", "deepspeed": "--no_python"}
_NO_PYTHON_MODULES = {"torch.distributed.run": "--no-python", "torch.distributed.launch": "--no-python"}
_RANK_VARIABLES = {"mpirun": "OMPI_COMM_WORLD_RANK", "mpiexec": "PMI_RANK", "srun": "SLURM_PROCID"}
_PYTHON = re.compile(r"python[\d.]*")
_MAX_PYTHON_SWITCHES = 4


def wrap_command(command: Sequence[str], out: str) -> list[str] | None:
    """Return `command` with `nsys profile` before the program of each rank; it writes `out`/nsys_<rank>.nsys-rep.

    Returns None if the position of the rank's program in the command is unknown.
    """
    words = list(command)
    name = PurePath(words[0]).name
    if name in _NO_PYTHON:
        return _wrap_script(words, 1, _NO_PYTHON[name], out)
    start = next((i for i, word in enumerate(words) if _PYTHON.fullmatch(PurePath(word).name)), None)
    if start is None:
        return None
    switches = range(start, min(len(words) - 1, start + _MAX_PYTHON_SWITCHES + 1))
    module = next((words[i + 1] for i in switches if words[i] == "-m"), "")
    if module in _NO_PYTHON_MODULES:
        return _wrap_script(words, words.index(module) + 1, _NO_PYTHON_MODULES[module], out)
    variable = _RANK_VARIABLES.get(name, "" if start == 0 else "RANK")
    return [*words[:start], *_nsys_words(out, f"%q{{{variable}}}" if variable else "0"), *words[start:]]


def _wrap_script(words: list[str], begin: int, switch: str, out: str) -> list[str] | None:
    """Insert `nsys profile python` before the script in a launcher's command; return None if it contains no script."""
    for i in range(begin, len(words)):
        if words[i] in ("-m", "--module"):
            launcher, program = words[:i], ["-m", *words[i + 1 :]]
        elif words[i].endswith(".py"):
            launcher, program = words[:i], words[i:]
        else:
            continue
        return [*launcher, switch, *_nsys_words(out, "%q{RANK}"), "python", "-u", *program]
    return None


def _nsys_words(out: str, rank: str) -> list[str]:
    return ["nsys", *_SWITCHES, f"--output={out}/nsys_{rank}"]


def explain_missing_reports(out: Path, ranks: Iterable[int]) -> str | None:
    """Return a message that lists the ranks without an nsys report, and the likely cause; None if there are none."""
    missing = [rank for rank in ranks if not (out / f"nsys_{rank}.nsys-rep").exists()]
    if not missing:
        return None
    return (
        f"nsys wrote no report of {format_ranks(missing)}: it records between cudaProfilerStart and "
        "cudaProfilerStop, which a window calls only in a process with CUDA; otherwise see the output of nsys"
    )
