"""Reports free memory, runs tasks in threads, and provides cached properties that several threads may read."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy  # noqa: F401 - before polars, which otherwise converts arrays half as fast
import polars as pl

MIN_PARALLEL_ROWS = 1_000_000
"""Rows from which two threads analyze faster than one; below, they would mostly wait for the interpreter."""
MIN_ARRAY_ROWS = 100_000
"""The same for work on whole columns, during which the interpreter is free."""
_Key = TypeVar("_Key")
_Result = TypeVar("_Result")
_First = TypeVar("_First")
_Second = TypeVar("_Second")
_thread = threading.local()
QUERY_STACK_BYTES = 16 << 20
"""Stack of a query thread that runs whole tasks ($RUST_MIN_STACK); it is 2 MiB otherwise, that of a main thread 8."""


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be used without swapping; half of the physical memory if that is unknown.

    The limits of the process (RLIMIT_AS) and of its control groups count, as in a container or a Slurm job.

    Args:
        root: The folder of ``proc`` and ``sys``.
    """
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with contextlib.suppress(OSError):
        if match := re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text()):
            available = int(match[1]) << 10
    return max(0, min([available, *_list_process_limits(root), *_list_group_limits(root)]))


def _list_process_limits(root: Path) -> Iterator[int]:
    """Yield the address space that the process may still use, if it is limited."""
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource  # not on Windows

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            used_bytes = int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            yield limit - used_bytes


_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers named by a line of /proc/self/cgroup (version 2 names none) -> files of limit and use, and the member of
memory.stat with the bytes that can be given back."""


def _list_group_limits(root: Path) -> Iterator[int]:
    """Yield the memory that each control group of the process may still use."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in {"", "memory"}.intersection(controllers.split(",")):
                mount = root / "sys/fs/cgroup" / controller
                group = mount / path.lstrip("/")
                while group.is_relative_to(
                    mount
                ):  # the limits of all parents hold; in a container some are hidden
                    yield from _read_group_limit(group, *_GROUP_FILES[controller])
                    group = group.parent


def _read_group_limit(group: Path, limit: str, use: str, reclaimable: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # the limit may be "max"
        free = int((group / limit).read_text()) - int((group / use).read_text())
        match = re.search(rf"^{reclaimable} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        yield free + (int(match[1]) if match else 0)


def run_in_parallel(
    work: Callable[[_Key], _Result], keys: Sequence[_Key], threads: int, *, has_queries: bool = True
) -> dict[_Key, _Result]:
    """Call ``work(key)`` for each key in up to ``threads`` threads; return {key: result} in the keys' order.

    The first exception of a thread is raised again. The threads are daemons: unlike those of an executor, they do not
    make Ctrl-C wait for a read that hangs. A single key needs none. Within `run_in_query_thread` nothing may wait for
    threads that run queries (``has_queries``), so none are started.
    """
    if len(keys) == 1 or (has_queries and getattr(_thread, "runs_queries", False)):
        return {key: work(key) for key in keys}
    remaining = iter(keys)
    results: dict[_Key, _Result] = {}
    raised: list[BaseException] = []

    def run() -> None:
        for key in remaining:  # an iterator over a sequence gives each item to one thread
            if raised:
                return
            try:
                results[key] = work(key)
            except BaseException as error:  # raised again below
                raised.append(error)

    running = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(keys)))]
    for thread in running:
        thread.start()
    for thread in running:
        while thread.is_alive():
            thread.join(0.1)  # with a timeout: polars makes waiting for a lock ignore Ctrl-C
    if raised:
        raise raised[0]
    return {key: results[key] for key in keys}


def run_paired(
    work: Callable[[_Key], _Result], keys: Sequence[_Key], rows: int, min_rows: int | None = None
) -> dict[_Key, _Result]:
    """Call ``work(key)`` for each key, two at a time if a call processes many ``rows``; return {key: result}.

    Below ``min_rows`` (default: `MIN_PARALLEL_ROWS`), and in a process of one thread, they run one after the other.
    """
    if _has_two_threads(rows, min_rows):
        return run_in_parallel(work, keys, 2)
    return {key: work(key) for key in keys}


def run_ahead(
    work: Callable[[_Key], _Result], keys: Iterable[_Key], rows: int, min_rows: int | None = None
) -> Iterator[_Result]:
    """Yield ``work(key)`` for each key in order; while the caller uses a result, two threads compute the next ones.

    There are no threads where `run_paired` has none, and where `run_in_parallel` has none for tasks with queries. The
    exception of a task is raised in place of its result.
    """
    if not _has_two_threads(rows, min_rows) or getattr(_thread, "runs_queries", False):
        yield from map(work, keys)
        return
    ahead: deque[_Task[_Result]] = deque()
    for key in keys:
        result = [ahead.popleft().wait()] if len(ahead) == 2 else []
        ahead.append(_Task(partial(work, key)))
        yield from result
    while ahead:
        yield ahead.popleft().wait()


class _Task(threading.Thread, Generic[_Result]):
    """A call in a thread of its own, which has been started; a daemon, see `run_in_parallel`."""

    def __init__(self, call: Callable[[], _Result]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._results: list[_Result] = []
        self._raised: list[BaseException] = []
        self.start()

    def run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:  # raised again by wait
            self._raised.append(error)

    def wait(self) -> _Result:
        """Return the result of the call, or raise its exception."""
        while self.is_alive():
            self.join(0.1)  # with a timeout, see `run_in_parallel`
        if self._raised:
            raise self._raised[0]
        return self._results[0]


def run_both(
    first: Callable[[], _First], second: Callable[[], _Second], rows: int, min_rows: int | None = None
) -> tuple[_First, _Second]:
    """Call two functions, concurrently if each processes many ``rows``, and return both results; see `run_paired`."""
    if not _has_two_threads(rows, min_rows):
        return first(), second()
    tasks: tuple[Callable[[], Any], ...] = (first, second)
    results: dict[int, Any] = run_in_parallel(lambda place: tasks[place](), (0, 1), 2)
    return results[0], results[1]


def _has_two_threads(rows: int, min_rows: int | None) -> bool:
    return rows >= (MIN_PARALLEL_ROWS if min_rows is None else min_rows) and pl.thread_pool_size() > 1


class shared_property(Generic[_Result]):
    """A cached property that several threads may read: the first reader computes it, the others wait for the value.

    The properties of an object must not need each other in a circle. The object holds the locks in its attribute
    ``locks``, a dict.
    """

    def __init__(self, function: Callable[[Any], _Result]) -> None:
        self._function = function
        self._name = function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, owner: Any, owner_class: type | None = None) -> _Result:
        if owner is None:
            return self  # type: ignore[return-value]
        with owner.locks.setdefault(self._name, threading.RLock()):
            if self._name not in owner.__dict__:
                owner.__dict__[self._name] = self._function(owner)
        result: _Result = owner.__dict__[self._name]
        return result


def run_in_query_thread(function: Callable[[], _Result]) -> _Result:
    """Call ``function()`` in a thread of polars' thread pool, and return its result.

    Queries of any other thread are handed to the pool and their results back, which takes as long as a query of a small
    table, and many times longer if other programs use the processors. The function must not wait for other threads that
    run queries: the pool may have a single thread.
    """
    results: list[_Result] = []
    raised: list[BaseException] = []

    def run(column: pl.Series) -> pl.Series:
        before, _thread.runs_queries = getattr(_thread, "runs_queries", False), True
        try:
            results.append(function())
        except BaseException as error:  # raised again below, as it is
            raised.append(error)
        finally:
            _thread.runs_queries = before
        return column

    # Two expressions, because a single one is evaluated in the thread of the caller.
    rows = pl.DataFrame({"of_function": [0], "other": [0]})
    rows.select(pl.col("of_function").map_batches(run, return_dtype=pl.Int64), pl.col("other") + 1)
    if raised:
        raise raised[0]
    return results[0]
