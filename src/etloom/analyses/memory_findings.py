"""Causes of wasted memory on a device, and of requests that ran out of memory, from a memory snapshot.

A row per cause, failed requests first, then most bytes:

- out-of-memory: a request that failed. bytes: the request. parts: the five places that hold most memory at that time.
  The advice names the smallest change of settings with which the simulated allocator satisfies it, or the bytes that
  are missing.
- fragmentation: at the peak, free bytes that live blocks keep from the driver. parts: these blocks' places.
- unused-reserved: at the peak, cached segments that no block uses, because they fit no request.
- allocator-retries: the allocator released its cached segments before an allocation, which waits for the device.
- leak: memory in use grows from one cycle of the program to the next, in four or more cycles in a row. bytes: of a
  cycle.
- optimizer-peak: most memory is in use in the optimizer's step. bytes: what the step requests and frees
  again, at most what exceeds the peak before it. State of the optimizer outlives the step and does not count.

pct: of the peak of reserved memory. confidence: high: measured; medium: measured, but part of it would remain; low:
estimated. parts: JSON list of objects with place and bytes.

Units: B, percent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import polars as pl

from etloom.analyses.helpers import check_percentage, conform_columns
from etloom.analyses.helpers.live_blocks import describe_blocks, sum_holders
from etloom.core.arrays import rows_of_ids
from etloom.core.errors import UnknownName
from etloom.core.text import count_noun, format_bytes
from etloom.core.trace import Trace
from etloom.timeline.memory.program import ALLOC, EMPTY_CACHE, FREE, Program, Simulation, find_programs
from etloom.timeline.memory.settings import parse_settings
from etloom.timeline.memory.what_if import find_needed_bytes

SCOPE = "rank"
DEFAULT_MIN_PCT = 5.0
EMPTY_MESSAGE = (
    f"no cause wastes at least --min-pct of the peak of reserved memory (default {DEFAULT_MIN_PCT:g} %); "
    "etloom simulate --memory capacity=SIZE with less than the program needs names what would lower its need"
)
COLUMNS = {
    "device": pl.Int64,
    "pattern": pl.String,
    "bytes": pl.Int64,
    "pct": pl.Float64,
    "confidence": pl.String,
    "title": pl.String,
    "advice": pl.String,
    "parts": pl.String,
}
CHANGES = (
    "expandable_segments:True",
    "max_split_size_mb:512",
    "max_split_size_mb:128",
    "garbage_collection_threshold:0.8",
)
"""Settings that are tried on a failed request, those with the fewest side effects first."""
MIN_CYCLES = 4
_FALL = 0.3
"""A cycle ends where memory falls by at least this share of its range."""
_PARTS = 5


class _Cause(NamedTuple):
    pattern: str
    bytes: int
    confidence: str
    title: str
    advice: str
    parts: str | None = None


class _View(NamedTuple):
    """A device: its program, the simulation of the recording, and the operation of the peak of reserved memory."""

    trace: Trace
    program: Program
    simulation: Simulation
    peak: int

    @property
    def reserved(self) -> int:
        return max(self.program.reserved_before, int(self.simulation.reserved[self.peak]))

    def find_holders(self, operation: int, order: str = "bytes") -> list[dict[str, Any]]:
        """Return the places with most ``order`` (a column of `sum_holders`) after the operations before one."""
        blocks = describe_blocks(self.trace, self.program, self.program.run(stop=operation))
        largest = sum_holders(blocks).sort(order, descending=True, maintain_order=True)
        return largest.filter(pl.col(order) > 0).head(_PARTS).select("place", bytes=order).to_dicts()


def analyze(
    trace: Trace,
    *,
    pattern: Annotated[str | None, "Only this pattern."] = None,
    min_pct: Annotated[
        float, "Hide causes with a smaller share; a failed request is always shown."
    ] = DEFAULT_MIN_PCT,
) -> pl.DataFrame:
    check_percentage(min_pct, "min_pct")
    if pattern is not None and pattern not in PATTERNS:
        raise UnknownName("pattern", pattern, PATTERNS, option="pattern")
    rows = []
    for program in find_programs(trace):
        simulation = program.run()
        view = _View(trace, program, simulation, simulation.reserved_peak)
        for name, find in PATTERNS.items():
            for cause in find(view) if pattern in (None, name) else ():
                pct = 100 * cause.bytes / max(view.reserved, 1)
                if pct >= min_pct or cause.pattern in _WITHOUT_LIMIT:
                    rows.append({"device": program.device, "pct": pct, **cause._asdict()})
    table = conform_columns(pl.DataFrame(rows, schema=COLUMNS), COLUMNS)
    return table.sort(pl.col("pattern") == "out-of-memory", "bytes", descending=True, maintain_order=True)


def _find_failure(view: _View) -> Iterator[_Cause]:
    program, simulation = view.program, view.simulation
    if not program.is_failure.any():
        return
    failed = int(program.is_failure.argmax())
    request = int(program.value[failed])
    before = max(failed - 1, 0)
    reserved, in_use = int(simulation.reserved[before]), int(simulation.allocated[before])
    split = reserved - in_use - int(simulation.releasable[before])
    device_free = view.trace.allocator["addr"][int(program.entry[failed])]
    parts = json.dumps(view.find_holders(failed), ensure_ascii=False)
    title = (
        f"a request of {format_bytes(request)} fails: {format_bytes(in_use)} of {format_bytes(reserved)} reserved are "
        f"in use, and {format_bytes(split)} are free in segments that live blocks split"
    )
    if device_free is None:
        yield _Cause(
            "out-of-memory", request, "low", title, "the free memory of the device is not recorded", parts
        )
        return
    capacity = reserved + int(device_free)
    until = program.until(failed + 1).without_automatic_releases()
    settings = replace(program.settings, capacity=capacity)
    passing = [text for text in CHANGES if until.run(parse_settings(text, settings)).first_failure is None]
    if passing:
        advice = f"PYTORCH_CUDA_ALLOC_CONF={passing[0]} lets it pass, says the simulated allocator"
    else:
        advice = "none of the settings that were tried lets it pass"
        if (needed := find_needed_bytes(until, program.settings)) is not None:
            advice += f"; it needs {format_bytes(max(needed - capacity, 0))} more memory, or less in use"
    yield _Cause("out-of-memory", request, "high", title, advice, parts)


def _find_fragmentation(view: _View) -> Iterator[_Cause]:
    simulation, at = view.simulation, view.peak
    split = int(simulation.reserved[at] - simulation.allocated[at] - simulation.releasable[at])
    parts = json.dumps(view.find_holders(at + 1, "split_bytes"), ensure_ascii=False)
    sizes = f"{format_bytes(split)} of {format_bytes(view.reserved)}"
    title = f"{sizes} reserved are free in segments that live blocks split"
    yield _Cause("fragmentation", split, "medium", title, _advise_expandable(view), parts)


def _find_unused(view: _View) -> Iterator[_Cause]:
    unused = int(view.simulation.releasable[view.peak])
    title = f"{format_bytes(unused)} of {format_bytes(view.reserved)} reserved are cached segments that fit no request"
    yield _Cause("unused-reserved", unused, "medium", title, _advise_expandable(view))


def _advise_expandable(view: _View) -> str:
    """Return the advice to let segments grow, with the peak that the simulated allocator then has."""
    if view.program.settings.expandable_segments:
        return "keep shapes stable"
    program = view.program.without_automatic_releases()
    reserved = program.run(replace(program.settings, expandable_segments=True)).reserved
    peak = max(program.reserved_before, int(reserved.max(initial=0)))
    if peak >= view.reserved:
        return "expandable_segments would not help, says the simulated allocator: keep shapes stable"
    advice = (
        f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lowers the peak from {format_bytes(view.reserved)} to "
        f"{format_bytes(peak)}, says the simulated allocator"
    )
    needed = find_needed_bytes(program, program.settings)
    if needed is not None and needed <= peak:
        advice += f"; unchanged, the program also fits {format_bytes(needed)}: the allocator then releases its cache"
    return advice


def _find_retries(view: _View) -> Iterator[_Cause]:
    program = view.program
    automatic = np.flatnonzero((program.action == EMPTY_CACHE) & ~program.is_explicit)
    if not len(automatic):
        return
    before = np.maximum(automatic - 1, 0)
    released = int((view.simulation.reserved[before] - view.simulation.reserved[automatic]).sum())
    title = f"the allocator released {format_bytes(released)} {count_noun(len(automatic), 'time')} to satisfy a request"
    yield _Cause("allocator-retries", released, "high", title, _advise_expandable(view))


def _find_leak(view: _View) -> Iterator[_Cause]:
    troughs = find_troughs(view.simulation.allocated)
    levels = view.simulation.allocated[troughs]
    growth = np.diff(levels)[1:]  # the first cycle may create the state of the optimizer
    if len(growth) < MIN_CYCLES - 1 or growth.min() <= 0.5 * np.median(growth):
        return
    usual = int(np.median(growth))
    title = f"memory in use grows by {format_bytes(usual)} in each of {len(growth)} cycles of the program"
    parts = json.dumps(_find_leaking_places(view, troughs), ensure_ascii=False)
    advice = (
        "release what the named lines keep: append numbers (loss.item()) instead of tensors with their graph"
    )
    yield _Cause("leak", usual, "medium", title, advice, parts)


def find_troughs(levels: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the places of the minima between rises and falls by at least `_FALL` of the range."""
    if not len(levels):
        return np.zeros(0, np.int64)
    least = _FALL * float(levels.max() - levels.min())
    troughs, low, high, is_rising = [], 0, 0, True
    for at, level in enumerate(levels.tolist()):
        if is_rising:
            high = max(high, level)
            if least and high - level >= least:
                is_rising, low = False, at
        elif level < levels[low]:
            low = at
        elif level - levels[low] >= least:
            troughs.append(low)
            is_rising, high = True, level
    return np.array(troughs, np.int64)


def _find_leaking_places(view: _View, troughs: np.ndarray[Any, np.dtype[np.int64]]) -> list[dict[str, Any]]:
    """Return the places of blocks that were requested between two troughs, and are in use at the last one."""
    last = int(troughs[-1]) + 1
    blocks = describe_blocks(view.trace, view.program, view.program.run(stop=last))
    growth = blocks.filter(pl.col("place").is_null() | (pl.col("owner") >= int(troughs[0])))
    return sum_holders(growth).head(_PARTS).select("place", "bytes").to_dicts()


def _find_optimizer_peak(view: _View) -> Iterator[_Cause]:
    program, allocated = view.program, view.simulation.allocated
    table = view.trace.allocator.select("id", "stack")
    rows = rows_of_ids(table, pl.Series(np.where(program.action == ALLOC, program.entry, -1)))
    is_step = table["stack"].cast(pl.String).str.contains(_OPTIMIZER).fill_null(False).to_numpy()
    in_step = (rows >= 0) & is_step[np.maximum(rows, 0)]
    if not in_step.any() or not in_step[int(allocated.argmax())]:
        return
    peak = int(allocated.argmax())
    blocks = program.run(stop=peak + 1).blocks.filter(pl.col("owner") >= 0)
    owners = blocks["owner"].cast(pl.Int64).to_numpy()
    # The state of the optimizer, which the first step creates, outlives it.
    requests = np.flatnonzero(program.action == ALLOC)
    after = requests[(requests > peak) & ~in_step[requests]]
    end = int(after[0]) if after.size else int(np.flatnonzero(in_step)[-1])
    is_freed_in_step = (program.action[:end] == FREE) & (np.arange(end) > peak)
    is_temporary = in_step[owners] & np.isin(owners, program.value[:end][is_freed_in_step])
    temporary = int(blocks["bytes"].to_numpy()[is_temporary].sum())
    # What happens between requests of a step, such as frees, belongs to it.
    before = allocated[: int(in_step.argmax())]
    excess = min(temporary, int(allocated[peak] - before.max(initial=0)))
    title = f"most memory is in use in the optimizer's step, {format_bytes(excess)} of it for this step only"
    advice = "update parameters and state in place, one after the other (foreach=False, or fused=True)"
    parts = json.dumps(view.find_holders(peak + 1), ensure_ascii=False)
    yield _Cause("optimizer-peak", excess, "medium", title, advice, parts)


_OPTIMIZER = r'"step \([^"]*optim[^"]*\.py:\d+\)"'
_WITHOUT_LIMIT = ("out-of-memory", "leak", "allocator-retries")
PATTERNS = {
    "out-of-memory": _find_failure,
    "fragmentation": _find_fragmentation,
    "unused-reserved": _find_unused,
    "allocator-retries": _find_retries,
    "leak": _find_leak,
    "optimizer-peak": _find_optimizer_peak,
}
