"""Functions run in polars' own threads return and raise as usual."""

from __future__ import annotations

import threading

import polars as pl
import pytest

from etloom.core.query_threads import run_in_query_thread


def test_a_function_runs_in_a_thread_of_the_pool_and_its_queries_too() -> None:
    def sum_there() -> tuple[int, int]:
        return threading.get_ident(), pl.DataFrame({"a": [1, 2]}).group_by("a").len()["len"].sum()

    thread, total = run_in_query_thread(sum_there)
    assert total == 2
    assert thread != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_its_exception_is_raised_as_it_is(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_in_query_thread(fail)
    assert raised.value is error
