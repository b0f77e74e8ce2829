"""Runs a command line on several processes, as launchers do, and collects their output."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables that torch reads when it is loaded."""


def free_port() -> int:
    """A port outside of the range from which the kernel gives ports to the connections of other tests."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def processes(
    count: int, run: Path, *options: str, launcher: str = "torchrun", part: str = "comms"
) -> list[Forked]:
    """Start a replay on ``count`` processes, which get their ranks from the variables of a launcher."""
    return forked(count, ["replay", part, str(run), "--master-port", str(free_port()), *options], launcher)


def forked(
    count: int, command: Sequence[str], launcher: str = "torchrun", main: str = "etloom.cli"
) -> list[Forked]:
    """Run a command line with ``main`` of a module in ``count`` processes.

    They are forked from a process that has torch loaded already, which saves seconds for each.
    """
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    return [
        Forked(
            command,
            {
                **inherited,
                "OMP_NUM_THREADS": "1",
                **dict(zip(LAUNCHERS[launcher], map(str, (rank, count, rank)), strict=True)),
            },
            main,
        )
        for rank in range(count)
    ]


def by_shell(count: int, *command: str) -> list[str]:
    """Return a shell command that runs a command on ``count`` processes like torchrun, which takes seconds to load."""
    ranks = " ".join(map(str, range(count)))
    settings = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} WORLD_SIZE={count}"
    each = f'for rank in {ranks}; do {settings} RANK=$rank LOCAL_RANK=$rank "$@" & done; wait'
    return ["sh", "-c", each, "sh", *command]


def ended(running: Sequence[Any], timeout: float = 400) -> list[tuple[int, str, str]]:
    """Wait for the processes; return (exit status, stdout, stderr) of each."""
    results = []
    for process in running:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            raise
        results.append((process.returncode, out, err))
    return results


class Forked:
    """A command line in a forked process, with the interface of subprocess.Popen."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], main: str) -> None:
        self.args = command
        self._written = []
        for _ in range(2):
            handle, name = tempfile.mkstemp(prefix="etloom-")
            os.close(handle)
            self._written.append(Path(name))
        process: Any = _forks().Process(
            target=_work, args=(main, command, environment, *map(str, self._written))
        )
        process.start()
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        status: int | None = self._process.exitcode
        return status

    poll = returncode.fget  # type: ignore[attr-defined]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        out, err = (file.read_text() if file.exists() else "" for file in self._written)
        for file in self._written:
            file.unlink(missing_ok=True)
        return out, err


@cache
def _forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *(
                "torch",
                "torch.distributed",
                "torch.profiler",
                "polars",
                "numpy",
                "etloom.cli",
                "etloom.cli.replay.full",
            ),
            *(
                "etloom.api",
                "etloom.loading",
                "etloom.linker",
                "etloom.formats.kineto",
                "etloom.formats.execution_trace",
            ),
            *(
                "etloom.replayer.comms.runner",
                "etloom.replayer.comms.session",
                "etloom.replayer.full",
                "etloom.replayer.compute.operator_replay",
                "etloom.replayer.compute.executor",
            ),
        ]
    )
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    forkserver.ensure_running()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def _work(main: str, command: Sequence[str], environment: Mapping[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for name, number in ((out, 1), (err, 2)):
        opened = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.exit(importlib.import_module(main).main(command))


def wait_for_calls(running: Sequence[Any]) -> None:
    """Wait until every rank reports in the replay's store that it is at a call."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    arguments = list(map(str, running[0].args))
    port = int(arguments[arguments.index("--master-port") + 1])
    until = time.monotonic() + 300
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    keys = [f"beat/{rank}" for rank in range(len(running))]
    while not store.check(keys) or not all(b"call" in store.get(key) for key in keys):
        assert time.monotonic() < until
        time.sleep(0.1)
