"""Engines that run tasks on ranks: "local" (this host) or "ray" (a Ray cluster).

A task is a function of etloom and a JSON text that names files; its result is files, too. So all hosts of a cluster
need the same version of etloom and see the same paths, and only short texts pass between processes. Ray schedules the
tasks, and runs those of a lost worker again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from etloom.core.errors import EtloomError, UnknownName, warn
from etloom.core.machine import run_in_parallel
from etloom.core.text import count_noun

LOCAL_ENGINE = "local"
ENGINES = (LOCAL_ENGINE, "ray")
MAX_RETRIES = 3
"""Workers that a task may lose before it is left to the process that started it."""
_MAX_ENDED = 64
"""Ended tasks that are handled at a time."""
_BOOTSTRAP = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from etloom.loading import worker; worker.serve(*sys.argv[1:])"
)
"""Starts a worker, which must not import modules from the current folder: that may be a stranger's."""
_QUERY_STACK_BYTES = 16 << 20
"""A task runs in a thread of polars, whose stack is 2 MiB otherwise; that of a main thread is 8 MiB."""


def check_engine(engine: str) -> None:
    """Raise UnknownName if the engine does not exist, and EtloomError if it needs Ray and Ray is not installed."""
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES, option="engine")
    if engine != LOCAL_ENGINE and not _has_ray():
        raise EtloomError("the engine ray needs Ray", remedy="pip install 'etloom[ray]'")


def _has_ray() -> bool:
    if "ray" in sys.modules:
        return sys.modules["ray"] is not None
    return importlib.util.find_spec("ray") is not None


def is_remote(engine: str) -> bool:
    """Return whether an engine runs its tasks on a cluster. Raises like `check_engine`."""
    check_engine(engine)
    return engine != LOCAL_ENGINE


def run_on_ray(
    function: Callable[[str], None], texts: Sequence[str], on_done: Callable[[int], None] | None = None
) -> None:
    """Run a function once per text argument, as tasks on a Ray cluster, and wait for all of them.

    The caller does the work of tasks that fail; one warning states their number and the first reason.

    Args:
        function: a function of a module of etloom; what it returns is ignored.
        texts: its argument, one per task.
        on_done: called with the index of each task that ended.

    Raises:
        EtloomError: Ray is not installed, or the cluster cannot be reached.
    """
    ray = connect()
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(function)
    running = {task.remote(text): index for index, text in enumerate(texts)}
    failures = []
    try:
        while running:
            ended, _ = ray.wait(list(running), num_returns=min(_MAX_ENDED, len(running)), timeout=1)
            for reference in ended:
                index = running.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    failures.append(str(error).strip().rpartition("\n")[2])
                if on_done is not None:
                    on_done(index)
    finally:
        for reference in running:  # after Ctrl-C
            ray.cancel(reference)
    if failures:
        warn(
            f"{count_noun(len(failures), 'task')} of {len(texts):,} failed on the Ray cluster, and this process does "
            f"their work: {failures[0]}"
        )


def run_in_processes(
    function: Callable[[str], None],
    texts: Sequence[str],
    processes: int,
    on_done: Callable[[int], None] = lambda index: None,
    pass_fds: Sequence[int] = (),
) -> None:
    """Run a function once per text argument in worker processes of this host, and wait for all of them.

    A process handles one task after another. The caller does the work of tasks that fail, and reports the reason.

    Args:
        function: a function of a module of etloom; what it returns is ignored.
        texts: its argument, one per task, without line breaks.
        processes: largest number of processes.
        on_done: called with the index of each task that ended, in any thread.
        pass_fds: files that the processes hold open as long as one of them works, also if this process was killed.
    """
    command = [sys.executable, "-c", _BOOTSTRAP, function.__module__, function.__name__]
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "RUST_MIN_STACK": str(_QUERY_STACK_BYTES)}
    remaining = iter(range(len(texts)))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            pass_fds=pass_fds,
        )

    def serve(_: int) -> None:
        worker = None
        for index in remaining:  # an iterator over a sequence gives each item to one thread
            if worker is None:
                worker = start()
            if not _run_task(worker, texts[index]):
                worker.kill()
                _end(worker)
                worker = None
            on_done(index)
        if worker is not None:
            _end(worker)

    run_in_parallel(serve, range(min(processes, len(texts))), processes)


def _run_task(worker: subprocess.Popen[str], text: str) -> bool:
    """Let a worker process run a task; return False if the process ended meanwhile."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(text + "\n")
        worker.stdin.flush()
    except OSError:
        return False
    return bool(worker.stdout.readline())


def _end(worker: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        worker.communicate()


def count_cpus(engine: str) -> int:
    """Return the number of CPUs of this host (engine "local") or of the Ray cluster. Raises like `run_on_ray`."""
    if is_remote(engine):
        return max(1, int(connect().cluster_resources().get("CPU", 1)))
    return os.cpu_count() or 1


def connect() -> Any:
    """Return the module ray, connected to the cluster at $RAY_ADDRESS, else to a running local cluster, else a new one.

    Raises:
        EtloomError: Ray is not installed, or there is no cluster at $RAY_ADDRESS.
    """
    check_engine("ray")
    import ray

    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address=address or "auto", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address or not isinstance(error, ConnectionError):
            raise EtloomError(
                f"the Ray cluster cannot be used: {str(error).partition(chr(10))[0]}",
                where=address,
                remedy="check RAY_ADDRESS and Ray's version; without a cluster, etloom starts one on this host",
            ) from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", **options)
    return ray
