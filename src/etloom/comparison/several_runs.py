"""Compare more than two runs: a verdict for each against the first, and one table with a column of times for each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import polars as pl

from etloom.comparison.difference_tables import SUMS, sum_run
from etloom.comparison.run_tables import has_steps
from etloom.core.errors import UnknownName
from etloom.core.trace import Job


def tabulate_runs(runs: Mapping[str, Job], by: str) -> pl.DataFrame:
    """Return the time of each run by category, family, operator, kernel, collective or rank, largest spread first.

    Times are ns per step if all runs have steps, else of the run, averaged over ranks; null where a run has no such
    row. Of operators it is the time of the GPU activity that they launch, if all runs have some.

    Args:
        runs: Name -> linked ranks; the column of a run is its name with _ns.
        by: A key of `SUMS`.

    Raises:
        UnknownName: The grouping does not exist.
    """
    if by not in SUMS:
        raise UnknownName("grouping", by, tuple(SUMS), option="by")
    is_stepped = all(map(has_steps, runs.values()))
    tables = {name: sum_run(job, by, is_stepped) for name, job in runs.items()}
    first = next(iter(tables.values()))
    keys = [name for name in first.columns if name != "count" and not name.endswith("ns")]
    has_gpu_time = "device_ns" in first.columns and all(table["device_ns"].sum() for table in tables.values())
    time = pl.col("device_ns" if has_gpu_time else "ns").round().cast(pl.Int64)
    sides = [table.select(*keys, time.alias(f"{name}_ns")) for name, table in tables.items()]
    joined = reduce(
        lambda left, right: left.join(right, on=keys, how="full", coalesce=True, nulls_equal=True), sides
    )
    times = [pl.col(f"{name}_ns").fill_null(0) for name in runs]
    spread = pl.max_horizontal(times) - pl.min_horizontal(times)
    return joined.sort(spread, *keys, descending=[True, *(False for _ in keys)])
