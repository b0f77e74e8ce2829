"""Engines that run tasks on ranks: "local" (this host) or "ray" (a Ray cluster).

A task is a function of etloom and a JSON text that names files; its result is also written to files. Only short texts
pass between processes, so all hosts of a cluster need the same version of etloom and must see the same paths. Ray
schedules the tasks, and repeats the tasks of a lost worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from etloom.core.errors import EtloomError, UnknownName, warn
from etloom.core.machine import QUERY_STACK_BYTES, run_in_parallel, run_in_query_thread
from etloom.core.text import count_noun

LOCAL_ENGINE = "local"
ENGINES = (LOCAL_ENGINE, "ray")
MAX_RETRIES = 3
"""Workers that a task may lose before it is left to the process that started it."""
_MAX_ENDED = 64
"""Ended tasks that are handled at a time."""
_BOOTSTRAP = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from etloom.loading import engines; engines.serve_tasks(*sys.argv[1:])"
)
"""Starts a worker, which must not import modules from the current folder, where anybody may have put files."""
_WORKER_ENVIRONMENT = {
    "POLARS_MAX_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RUST_MIN_STACK": str(QUERY_STACK_BYTES),
}
"""One thread per process: there are as many processes as processors."""
ANSWER = "etloom: task ended\n"
"""The line with which a worker answers each task."""


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

    A process handles one task after another. The caller does the work of tasks that fail, and reports the reason. No
    process outlives this call, also if it is interrupted.

    Args:
        function: a function of a module of etloom; what it returns is ignored.
        texts: its argument, one per task, without line breaks.
        processes: largest number of processes.
        on_done: called with the index of each task that ended, in any thread.
        pass_fds: files that the processes hold open as long as one of them works, also if this process was killed.
    """
    remaining = iter(range(len(texts)))  # an iterator over a sequence gives each item to one thread
    workers = _Workers(function, pass_fds)

    def serve(_: int) -> None:
        worker = workers.start()
        try:
            while worker is not None and (index := next(remaining, None)) is not None:
                if not worker.run(texts[index]):
                    worker.stop()
                    worker = workers.start() if worker.has_answered else None  # else none would work
                if workers.is_stopped:  # stopping them takes longer than a short task
                    return
                on_done(index)
        except BaseException:
            workers.stop()  # other threads start no further task
            raise

    try:
        run_in_parallel(serve, range(min(processes, len(texts))), processes, has_queries=False)
    finally:
        workers.stop()


class _Workers:
    """Starts worker processes, and stops all of them."""

    def __init__(self, function: Callable[[str], None], pass_fds: Sequence[int]) -> None:
        self._function, self._pass_fds = function, pass_fds
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self.is_stopped = False

    def start(self) -> _Worker | None:
        """Start a process; None if that is not possible, or after `stop`."""
        with self._lock, contextlib.suppress(OSError):
            if not self.is_stopped and sys.executable:  # which is empty in a program that embeds Python
                self._workers.append(worker := _Worker(self._function, self._pass_fds))
                return worker
        return None

    def stop(self) -> None:
        """End all processes."""
        with self._lock:
            self.is_stopped = True
        for worker in self._workers:
            worker.stop()


class _Worker:
    """A process that runs `serve_tasks`."""

    def __init__(self, function: Callable[[str], None], pass_fds: Sequence[int]) -> None:
        self.has_answered = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, function.__module__, function.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **_WORKER_ENVIRONMENT},
            pass_fds=pass_fds,
        )

    def run(self, text: str) -> bool:
        """Let the process run a task; return False if the process ended meanwhile."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or `stop` closed its files
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:  # also what Python's start-up prints
                if line == ANSWER:
                    self.has_answered = True
                    return True
        return False

    def stop(self) -> None:
        """End the process, in any state."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


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


def serve_tasks(module: str, name: str) -> None:
    """Call the function ``name`` of a module with each line of stdin, in a worker; answer each with `ANSWER`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would handle it at the end of a task
    run_in_query_thread(partial(_serve_tasks, module, name))


def _serve_tasks(module: str, name: str) -> None:
    function = getattr(importlib.import_module(module), name)
    gc.freeze()  # the modules stay: garbage collections need not go through them
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    for line in sys.stdin:
        function(line)
        os.write(answers, ANSWER.encode())
