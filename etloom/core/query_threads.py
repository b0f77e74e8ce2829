"""The threads in which polars runs queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import polars as pl

_Result = TypeVar("_Result")


def run_in_query_thread(function: Callable[[], _Result]) -> _Result:
    """Return ``function()``, run in a thread of polars' pool.

    Queries of any other thread are handed to the pool and their results back, which takes as long as a query of a small
    table, and many times longer if other programs use the processors. The function must not wait for other threads that
    run queries: the pool may have a single thread.
    """
    results: list[_Result] = []
    raised: list[BaseException] = []

    def run(column: pl.Series) -> pl.Series:
        try:
            results.append(function())
        except BaseException as error:  # raised again below, as it is
            raised.append(error)
        return column

    # Two expressions, because a single one is evaluated in the thread of the caller.
    rows = pl.DataFrame({"of_function": [0], "other": [0]})
    rows.select(pl.col("of_function").map_batches(run, return_dtype=pl.Int64), pl.col("other") + 1)
    if raised:
        raise raised[0]
    return results[0]
