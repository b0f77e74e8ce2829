"""Engines that run tasks on ranks: "local" (this process and host) or "ray" (a Ray cluster).

A task is a function of etloom and a JSON text that names files; its result is files, too. So all hosts of a cluster
need the same version of etloom and see the same paths, and only short texts pass through Ray. Ray schedules the tasks,
and runs those of a lost worker again.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from etloom.core.errors import EtloomError, UnknownName, warn
from etloom.core.text import count_noun

LOCAL_ENGINE = "local"
ENGINES = (LOCAL_ENGINE, "ray")
MAX_RETRIES = 3
"""Workers that a task may lose before it is left to the process that started it."""
_MAX_ENDED = 64
"""Ended tasks that are handled at a time."""


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
