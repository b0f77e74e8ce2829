"""Memory of a caching allocator over time, reduced to a few hundred moments, with what holds it at each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from etloom.analyses.helpers.live_blocks import BEFORE, UNKNOWN, describe_blocks, find_places
from etloom.core.trace import Trace
from etloom.timeline.memory.program import ALLOC, FREE, Int64Array, Program, Simulation, find_programs

PARTS = 120
"""Parts, of the operations and of the time, of which each keeps its extremes."""
MAX_EXACT = 600
"""Longest program of which each operation is a moment."""
HOLDER_COLUMNS = ("kind", "line", "operator")


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of a device at some moments, which include the maxima of each size.

    Attributes:
        device: The device.
        is_exact: Whether each request and free is a moment.
        operations: The last operation before each moment.
        times: Time of each moment, ns, on the clock of the trace; None if the recording has no times.
        reserved, allocated, requested: Bytes at each moment.
        releasable: Of the free bytes, those that empty_cache() would return to the driver.
        holders: kind, line and operator of what holds memory; a row each.
        doubt: How the simulation differs from the recording, one sentence; None if it does not.
        holder_bytes, holder_blocks: Bytes and number of the blocks of each holder (row) at each moment (column).
    """

    device: int
    is_exact: bool
    operations: Int64Array
    times: Int64Array | None
    reserved: Int64Array
    allocated: Int64Array
    requested: Int64Array
    releasable: Int64Array
    holders: pl.DataFrame
    holder_bytes: Int64Array
    holder_blocks: Int64Array
    doubt: str | None


def measure_curves(trace: Trace) -> list[MemoryCurve]:
    """Return the curve of each device whose allocator's history was recorded.

    Raises:
        AnalysisError: The trace contains no such history, or it does not match the segments.
    """
    places = find_places(trace, HOLDER_COLUMNS[0]).rename({"place": HOLDER_COLUMNS[0]})
    for name in HOLDER_COLUMNS[1:]:
        places = places.join(find_places(trace, name).rename({"place": name}), on="entry", how="left")
    # A backward node or an operator stands in for the line where no Python was recorded.
    is_repeated = pl.col("line").eq_missing(pl.col("operator"))
    places = places.with_columns(operator=pl.when(~is_repeated).then("operator"))
    return [_measure(trace, program, places) for program in find_programs(trace) if len(program.action)]


def _measure(trace: Trace, program: Program, places: pl.DataFrame) -> MemoryCurve:
    simulation = program.run()
    times = None if program.time.null_count() else np.maximum.accumulate(program.time.to_numpy())
    moments = _choose_moments(simulation, times)
    before = describe_blocks(trace, program, program.run(stop=0)).filter(pl.col("owner") < 0)
    before = before.filter(pl.col("place").is_not_null()).sort("owner", descending=True)
    entries = pl.DataFrame(
        {"entry": [*program.entry.tolist(), *before["entry"].to_list()]}, schema={"entry": pl.Int64}
    )
    facts = entries.join(places, on="entry", how="left", maintain_order="left")
    origin = (
        pl.when(pl.int_range(pl.len()) < len(program.entry)).then(pl.lit(UNKNOWN)).otherwise(pl.lit(BEFORE))
    )
    facts = facts.select("kind", pl.coalesce("line", origin).alias("line"), "operator")
    holders = facts.unique(maintain_order=True).with_row_index("holder")
    codes = facts.join(holders, on=HOLDER_COLUMNS, how="left", nulls_equal=True, maintain_order="left")[
        "holder"
    ]
    numbers = codes.to_numpy().astype(np.int64)
    operations, holder, sizes, blocks = _list_changes(program, simulation, numbers, before)
    holder_bytes, holder_blocks = (
        _sum_changes(operations, holder, changes, moments, holders.height) for changes in (sizes, blocks)
    )
    is_used = holder_bytes.any(axis=1)
    return MemoryCurve(
        program.device, len(moments) == len(program.action), moments, None if times is None else times[moments],
        simulation.reserved[moments], simulation.allocated[moments], simulation.requested[moments],
        simulation.releasable[moments], holders.drop("holder").filter(pl.Series(is_used)),
        holder_bytes[is_used], holder_blocks[is_used], program.describe_doubt(),
    )  # fmt: skip


def _choose_moments(simulation: Simulation, times: Int64Array | None) -> Int64Array:
    """Return the operations with the extremes of each part of the history, and the first and the last; if there are
    few, all."""
    count = len(simulation.reserved)
    if count <= MAX_EXACT:
        return np.arange(count)
    edges = [np.linspace(0, count, PARTS + 1).astype(np.int64)]
    if times is not None:
        edges.append(np.searchsorted(times, np.linspace(times[0], times[-1] + 1, PARTS + 1)))
    chosen = {0, count - 1}
    for bounds in edges:
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if start == end:
                continue
            for values in (
                simulation.allocated,
                -simulation.allocated,
                simulation.reserved,
                simulation.requested,
            ):
                chosen.add(start + int(values[start:end].argmax()))
    return np.array(sorted(chosen), np.int64)


def _list_changes(
    program: Program, simulation: Simulation, codes: Int64Array, before: pl.DataFrame
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return operation (-1: before all), holder, bytes and number of blocks of each change of the blocks in use.

    Args:
        program: The operations.
        simulation: Their simulation.
        codes: The holder of each operation, then that of each block from before.
        before: The blocks from before, in the order of the program.
    """
    count = len(program.action)
    bytes_before = before["bytes"].to_numpy()
    change = np.diff(simulation.allocated, prepend=int(bytes_before.sum()))
    # A free belongs to the holder of its request, or of the block from before.
    request = np.where(program.value >= 0, program.value, count - 1 - program.value)
    request = np.where(
        program.action == FREE, np.minimum(request, count + before.height - 1), np.arange(count)
    )
    is_change = np.isin(program.action, (ALLOC, FREE)) & (change != 0)
    operations = np.flatnonzero(is_change)
    return (
        np.concatenate([np.full(before.height, -1), operations]),
        np.concatenate([codes[count:], codes[request[operations]]]),
        np.concatenate([bytes_before, change[operations]]),
        np.concatenate([np.ones(before.height, np.int64), np.sign(change[operations])]),
    )


def _sum_changes(
    operations: Int64Array, holders: Int64Array, changes: Int64Array, moments: Int64Array, count: int
) -> Int64Array:
    """Return the sum of the changes of each of ``count`` holders (row) until each moment (column)."""
    at = np.searchsorted(moments, operations)
    cells = np.bincount(holders * len(moments) + at, weights=changes, minlength=count * len(moments))
    sums: Int64Array = cells.reshape(count, len(moments)).cumsum(axis=1).round().astype(np.int64)
    return sums
