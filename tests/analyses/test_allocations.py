"""Memory of several processes of a rank."""

from __future__ import annotations

import polars as pl
import pytest

from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.timeline.allocations import find_allocations

Row = tuple[int, int, int, int, int | None, int]  # ts, pid, bytes, total allocated, total reserved, device


def totals(*rows: Row) -> tuple[list[int], list[int | None]]:
    """Return the allocated and the reserved totals after each row; the rows are in order of time."""
    columns = ("ts", "pid", "bytes", "total_allocated", "total_reserved", "device")
    table = pl.DataFrame(rows, schema=columns, orient="row").with_columns(
        id=pl.int_range(pl.len()), device_type=pl.lit(1)
    )
    allocations = find_allocations(Trace({"memory": TABLES["memory"].conform(table)}))
    return allocations["total_allocated"].to_list(), allocations["total_reserved"].to_list()


def test_totals_of_each_device_are_summed() -> None:
    # On device 0, process 1 has 100 B before its first event, process 2 has 1,000 B.
    assert totals(
        (1, 1, 10, 110, 200, 0),
        (2, 2, 20, 1020, 2000, 0),
        (2, 1, 7, 7, 10, 1),
        (3, 1, -5, 105, 300, 0),
        (3, 2, 3, 3, 10, 1),
        (4, 2, -20, 1000, 1500, 0),
        (5, 1, 1, 8, 20, 1),
    ) == ([1110, 1130, 7, 1125, 10, 1105, 11], [2200, 2200, 20, 2300, 20, 1800, 30])


@pytest.mark.parametrize("pid", [1, -1])
def test_totals_of_one_process_and_of_unknown_ones_are_unchanged(pid: int) -> None:
    rows = ((1, 1, 10, 110, 200, 0), (2, pid, 10, 120, 200, 0), (3, 1, 10, 130, 200, 0))
    assert totals(*rows) == ([110, 120, 130], [200, 200, 200])


def test_processes_one_after_another_are_not_summed() -> None:
    rows = ((1, 1, 10, 110, 200, 0), (2, 1, 10, 120, 200, 0), (3, 2, 10, 110, 200, 0), (4, 2, 5, 115, 200, 0))
    assert totals(*rows) == ([110, 120, 110, 115], [200, 200, 200, 200])


def test_reserved_memory_that_is_unknown() -> None:
    unknown = ((1, 1, 10, 10, None, 0), (2, 2, 10, 10, None, 0), (3, 1, 10, 20, None, 0))
    assert totals(*unknown) == ([10, 20, 30], [None, None, None])
    partly = (
        (1, 1, 10, 10, None, 0),
        (2, 2, 10, 10, 500, 0),
        (3, 1, 10, 20, 1000, 0),
        (4, 2, 1, 11, None, 0),
        (5, 2, 1, 12, 700, 0),
    )
    assert totals(*partly) == ([10, 20, 30, 31, 32], [1500, 1500, 1500, 1500, 1700])
