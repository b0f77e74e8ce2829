"""Tasks in threads give results in order or the first error; a property is computed once for all threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import polars as pl
import pytest

from etloom.core import machine
from etloom.core.machine import run_in_parallel, run_in_query_thread, shared_property


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_results_are_in_the_order_of_the_keys(threads: int) -> None:
    def work(key: int) -> int:
        time.sleep(0.001 * (5 - key))
        return key * key

    assert list(run_in_parallel(work, range(5), threads).items()) == [(key, key * key) for key in range(5)]
    assert run_in_parallel(work, [], threads) == {}


def test_the_first_error_of_a_task_is_raised() -> None:
    def work(key: int) -> int:
        if key:
            raise ValueError(f"task {key}")
        return key

    with pytest.raises(ValueError, match=r"task [12]"):
        run_in_parallel(work, [0, 1, 2], 2)


@pytest.mark.parametrize("has_threads", [False, True])
def test_next_results_are_computed_ahead(has_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time, in order, and up to the first that raises."""
    monkeypatch.setattr(machine, "_has_two_threads", lambda rows, min_rows: has_threads)
    ahead = threading.Event()
    running: list[int] = []

    def work(key: int) -> int:
        running.append(key)
        assert len(running) <= 2
        if key == 2:
            ahead.set()
        time.sleep(0.001 * (key % 2))
        running.remove(key)
        if key == 5:
            raise ValueError("task 5")
        return key * key

    results = machine.run_ahead(work, range(7), 1)
    assert next(results) == 0
    assert ahead.wait(10 if has_threads else 0) == has_threads
    assert [next(results) for _ in range(4)] == [1, 4, 9, 16]
    with pytest.raises(ValueError, match="task 5"):
        next(results)
    assert list(machine.run_ahead(work, [], 1)) == []


def test_a_property_is_computed_once_for_all_threads() -> None:
    class Shared:
        def __init__(self) -> None:
            self.locks: dict[Any, Any] = {}
            self.computed: list[str] = []

        @shared_property
        def inner(self) -> int:
            """An inner value."""
            time.sleep(0.05)
            self.computed.append("inner")
            return 20

        @shared_property
        def outer(self) -> int:
            self.computed.append("outer")
            return self.inner + 1

    shared, start = Shared(), threading.Barrier(4)

    def work(name: str) -> int:
        start.wait()
        value: int = getattr(shared, name[:5])
        return value

    names = ["inner", "outer", "inner2", "outer2"]
    assert run_in_parallel(work, names, 4) == dict(zip(names, (20, 21, 20, 21), strict=True))
    assert sorted(shared.computed) == ["inner", "outer"]
    assert Shared.inner.__doc__ == "An inner value."
    assert Shared().inner == 20


def test_a_function_runs_in_a_thread_of_the_pool_and_its_queries_too() -> None:
    def sum_there() -> tuple[int, int]:
        return threading.get_ident(), pl.DataFrame({"a": [1, 2]}).group_by("a").len()["len"].sum()

    thread, total = run_in_query_thread(sum_there)
    assert total == 2
    assert thread != threading.get_ident()


def test_there_no_other_threads_run_queries() -> None:
    """With a pool of one thread their queries would never end."""

    def list_threads(has_queries: bool) -> set[int]:
        threads = run_in_parallel(lambda _: threading.get_ident(), range(4), 2, has_queries=has_queries)
        return {*threads.values(), threading.get_ident()}

    def list_after_another() -> set[int]:
        run_in_query_thread(lambda: None)
        return list_threads(True)

    assert len(run_in_query_thread(lambda: list_threads(True))) == 1
    assert len(run_in_query_thread(list_after_another)) == 1
    assert len(run_in_query_thread(lambda: list_threads(False))) > 1
    assert len(list_threads(True)) > 1


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_its_exception_is_raised_as_it_is(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_in_query_thread(fail)
    assert raised.value is error
