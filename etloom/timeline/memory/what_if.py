"""Predict the memory of a recorded program with other settings, another capacity, or further calls of empty_cache().

A change is text in the form of PYTORCH_CUDA_ALLOC_CONF, with two more names: ``capacity`` (bytes that the allocator can
get from the driver: the memory of the device without the CUDA context and what other libraries hold) and
``empty_cache`` (call torch.cuda.empty_cache() at a moment: peak, reserved-peak, end, oom, or a time after the first
operation).

The program is the recorded one: requests, frees and calls of empty_cache() in their order. What the allocator decided
itself, such as releasing cached segments before it ran out of memory, is decided again. A program that runs out of
memory stops: what follows its first failure is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from etloom.timeline.memory.program import Program, Simulation, parse_moment
from etloom.timeline.memory.settings import MIB, UNLIMITED, Settings, parse_settings, split_settings

COLUMNS = {
    "device": pl.Int64,
    "change": pl.String,
    "fits": pl.Boolean,
    "capacity_bytes": pl.Int64,
    "peak_reserved_bytes": pl.Int64,
    "peak_allocated_bytes": pl.Int64,
    "needed_bytes": pl.Int64,
    "retries": pl.Int64,
    "failed_bytes": pl.Int64,
    "failed_after_ns": pl.Int64,
}
RECORDED = "recorded"
_STEP = 2 * MIB
"""Memory is taken from the driver in multiples of this."""
_MAX_OPERATIONS = 200_000
"""Longest program of which the needed memory is searched, which takes some twenty simulations."""


def compare_changes(program: Program, changes: Sequence[str]) -> pl.DataFrame:
    """Return a row for the recorded settings and one for each change, with `COLUMNS`.

    fits: no request fails. peak_reserved_bytes, peak_allocated_bytes: the most that the allocator took from the driver,
    and had in use, until then. needed_bytes: the smallest capacity with which no request fails (to 2 MiB; null if the
    recording has more than 200,000 requests and frees). retries: how often the allocator released all cached segments
    to satisfy a request, which waits for the device. failed_bytes, failed_after_ns: the first request that fails.

    Raises:
        InvalidValue: A change names an unknown setting, or has an invalid value.
        AnalysisError: A moment is not in the recording.
    """
    rows = [_describe(program, RECORDED, program.run(), program.settings)]
    for text in changes:
        changed, settings = apply_change(program, text)
        rows.append(_describe(changed, text, changed.run(settings), settings))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def parse_change(text: str, recorded: Settings | None = None) -> tuple[Settings, list[str]]:
    """Return the settings that a change describes, and the moments at which it empties the cache.

    Args:
        recorded: The settings that apply where the text names none.

    Raises:
        InvalidValue: A setting is unknown, or has an invalid value.
    """
    pairs = split_settings(text)
    moments = [value for name, value in pairs if name == "empty_cache"]
    for moment in moments:
        parse_moment(moment, option="memory")
    rest = ",".join(f"{name}:{value}" for name, value in pairs if name != "empty_cache")
    return parse_settings(rest, recorded), moments


def apply_change(program: Program, text: str) -> tuple[Program, Settings]:
    """Return the program and the settings that a change describes."""
    settings, moments = parse_change(text, program.settings)
    changed = _start_within(program.without_automatic_releases(), settings.capacity)
    for operation in sorted((changed.find_operation(moment) for moment in moments), reverse=True):
        changed = changed.with_empty_cache(operation)
    return changed, settings


def find_needed_bytes(program: Program, settings: Settings) -> int | None:
    """Return the smallest capacity with which no request fails, to 2 MiB; None if the program is too long to search.

    The peak of reserved memory is an upper bound: with less, the allocator releases cached segments and tries again.
    """
    if len(program.action) > _MAX_OPERATIONS:
        return None
    unlimited = program.run(replace(settings, capacity=0))
    low = int(unlimited.allocated.max(initial=0)) // _STEP - 1
    high = -(-_find_peak(program, unlimited) // _STEP)
    while high - low > 1:
        middle = (low + high) // 2
        limited = replace(settings, capacity=max(middle, 1) * _STEP)
        fails = _start_within(program, limited.capacity).run(limited).first_failure is not None
        low, high = (middle, high) if fails else (low, middle)
    return high * _STEP


def _start_within(program: Program, capacity: int) -> Program:
    """Return the program without the cached segments from before it, if the device could not have held them."""
    return program.with_empty_cache(0) if 0 < capacity < program.reserved_before else program


def _describe(program: Program, change: str, simulation: Simulation, settings: Settings) -> tuple[Any, ...]:
    failure = simulation.first_failure
    is_recorded = change == RECORDED
    until = len(program.action) if failure is None else failure
    failed = None if failure is None else simulation.events.filter(pl.col("kind") == "oom")["bytes"][0]
    after = None if failure is None or program.time.null_count() else program.time[failure] - program.time[0]
    retries = simulation.events.filter((pl.col("kind") == "retry") & (pl.col("operation") < until)).height
    return (
        program.device,
        change,
        not program.is_failure.any() if is_recorded else failure is None,
        settings.capacity or None,
        _find_peak(program, simulation, until),
        int(simulation.allocated[:until].max(initial=0)),
        find_needed_bytes(program.without_automatic_releases(), settings),
        None if is_recorded else retries,
        failed,
        after,
    )


def _find_peak(program: Program, simulation: Simulation, until: int = UNLIMITED) -> int:
    starts_empty = len(program.entry) > 0 and program.entry[0] < 0
    before = 0 if starts_empty else program.reserved_before
    return max(before, int(simulation.reserved[:until].max(initial=0)))
