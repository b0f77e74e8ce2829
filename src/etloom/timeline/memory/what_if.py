"""Predict the memory of a recorded program with other settings, another capacity, or changes of the program.

A change is text in the form of PYTORCH_CUDA_ALLOC_CONF, with more names: ``capacity`` (bytes that the allocator can
get from the driver: the memory of the device without the CUDA context and what other libraries hold), ``empty_cache``
(call torch.cuda.empty_cache() at a moment: peak, reserved-peak, end, oom, or a time after the first operation),
``checkpoint`` (torch.utils.checkpoint around the calls of a module) and ``batch`` (x2: twice the batch).

Otherwise the program is the recorded one: requests, frees and empty_cache() in their order. What the allocator decided
itself, such as releasing cached segments before it ran out of memory, is decided again. A program that runs out of
memory stops: what follows its first failure is not simulated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import polars as pl

from etloom.core.errors import AnalysisError, InvalidValue
from etloom.timeline.memory.program import Program, Simulation, parse_moment
from etloom.timeline.memory.program_changes import checkpoint_module, rank_module_calls, scale_batch
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
    "repeated_requests": pl.Int64,
    "repeated_ns": pl.Int64,
}
RECORDED = "recorded"
_STEP = 2 * MIB
"""Memory is taken from the driver in multiples of this."""
_MIN_HELP = 0.99
"""Share of the needed memory above which a change does not help."""
_MAX_MODULES = 8
"""Modules of which checkpointing is tried."""
_MAX_OPERATIONS = 200_000
"""Longest program of which the needed memory is searched, which takes some twenty simulations."""


def compare_changes(
    program: Program, changes: Sequence[str], other_batch: Program | None = None
) -> pl.DataFrame:
    """Return a row for the recorded settings and one for each change, with `COLUMNS`.

    fits: no request fails. peak_reserved_bytes, peak_allocated_bytes: the most that the allocator took from the driver,
    and had in use, until then. needed_bytes: the smallest capacity with which no request fails (to 2 MiB; null if the
    recording has more than 200,000 requests and frees). retries: how often the allocator released all cached segments
    and tried a request again, which waits for the device. failed_bytes, failed_after_ns: the first request that fails.
    repeated_requests, repeated_ns: what checkpointing computes again, and the recorded time of it on the host (null if
    the recording has no times).

    Args:
        program: The recorded program.
        changes: As `parse_change` expects them.
        other_batch: The program recorded with another batch; ``batch`` needs it.

    Raises:
        InvalidValue: A change names an unknown setting or module, or has an invalid value.
        AnalysisError: A moment, a backward pass or a second batch is not in the recordings.
    """
    needed = find_needed_bytes(program.without_automatic_releases(), program.settings)
    rows = [_describe(program, RECORDED, program.run(), program.settings, needed)]
    for text in changes:
        try:
            changed, settings = apply_change(program, text, other_batch)
        except AnalysisError as error:
            raise AnalysisError(f"{text}: {error.what}", remedy=error.remedy) from None
        started = start_within(changed, settings.capacity)
        needed = find_needed_bytes(changed, settings)
        rows.append(_describe(started, text, started.run(settings), settings, needed))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


class Change(NamedTuple):
    """Settings, modules to checkpoint, moments at which the cache is emptied, and the factor of the batch."""

    settings: Settings
    modules: list[str]
    moments: list[str]
    batch: float | None


def parse_change(text: str, recorded: Settings | None = None) -> Change:
    """Parse a change such as "capacity=40GiB,checkpoint=model.py:12,batch=x2".

    Args:
        text: Names and values.
        recorded: The settings that apply where the text names none.

    Raises:
        InvalidValue: A setting is unknown, or has an invalid value.
    """
    pairs = split_settings(text)
    if not pairs:
        raise InvalidValue("no setting", remedy='write --memory "expandable_segments:True"', option="memory")
    values: dict[str, list[str]] = {"checkpoint": [], "empty_cache": [], "batch": []}
    for name, value in pairs:
        values.get(name, []).append(value)
    for moment in values["empty_cache"]:
        parse_moment(moment, option="memory")
    factors = [_parse_factor(factor) for factor in values["batch"]]
    rest = ",".join(f"{name}:{value}" for name, value in pairs if name not in values)
    settings = parse_settings(rest, recorded)
    if 0 < settings.capacity < _STEP:
        raise InvalidValue(
            f"a capacity of {settings.capacity:,} B is less than a segment of 2 MiB",
            remedy="write a unit, such as capacity=40GB",
            option="memory",
        )
    if "garbage_collection_threshold" in dict(pairs) and not settings.capacity:
        raise InvalidValue(
            "garbage_collection_threshold has no effect without a limit",
            remedy="add capacity=40GB",
            option="memory",
        )
    return Change(settings, values["checkpoint"], values["empty_cache"], factors[-1] if factors else None)


def _parse_factor(text: str) -> float:
    match = re.fullmatch(r"x(\d{1,4}(?:\.\d{1,6})?)", text)
    if match is None or float(match[1]) == 0:
        raise InvalidValue(f"invalid value {text!r} of batch; expected a factor such as x2", option="memory")
    return float(match[1])


def apply_change(program: Program, text: str, other_batch: Program | None = None) -> tuple[Program, Settings]:
    """Return the program and the settings that a change describes, see `compare_changes`."""
    change = parse_change(text, program.settings)
    changed = program.without_automatic_releases()
    if change.batch is not None:
        changed = scale_batch(changed, other_batch, change.batch)
    for module in change.modules:
        changed = checkpoint_module(changed, module)
    for operation in sorted((changed.find_operation(moment) for moment in change.moments), reverse=True):
        changed = changed.with_empty_cache(operation)
    return changed, change.settings


def find_help(program: Program, text: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Return further changes with which a program that does not fit needs at least 1 % less, with the bytes it needs,
    and all changes that were tried.

    Tried are expandable segments, and checkpointing of the module with which the peak is lowest, of those whose calls
    request most.
    """
    unchanged, given = apply_change(program, text)
    before = find_needed_bytes(unchanged, given)
    tried = []
    for module in rank_module_calls(program)[:_MAX_MODULES]:
        with suppress(AnalysisError):
            change = f"checkpoint={module}"
            changed, settings = apply_change(program, f"{text},{change}")
            peak = int(changed.run(replace(settings, capacity=0)).allocated.max(initial=0))
            tried.append((peak, change))
    changes = [] if given.expandable_segments else ["expandable_segments:True"]
    changes += [change for _, change in sorted(tried)[:1]]
    needs = [(change, find_needed_bytes(*apply_change(program, f"{text},{change}"))) for change in changes]
    if before is None:
        return [], []
    helps = [(change, size) for change, size in needs if size is not None and size <= _MIN_HELP * before]
    return helps, changes


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
        fails = start_within(program, limited.capacity).run(limited).first_failure is not None
        low, high = (middle, high) if fails else (low, middle)
    return high * _STEP


def start_within(program: Program, capacity: int) -> Program:
    """Return the program without the cached segments from before it, if the device could not have held them."""
    return program.with_empty_cache(0) if 0 < capacity < program.reserved_before else program


def _describe(
    program: Program, change: str, simulation: Simulation, settings: Settings, needed: int | None
) -> tuple[Any, ...]:
    failure = simulation.first_failure
    is_recorded = change == RECORDED
    until = len(program.action) if failure is None else failure
    failed = None if failure is None else simulation.events.filter(pl.col("kind") == "oom")["bytes"][0]
    after = None if failure is None or program.time.null_count() else program.time[failure] - program.time[0]
    retries = simulation.events.filter((pl.col("kind") == "retry") & (pl.col("operation") <= until)).height
    return (
        program.device,
        change,
        not program.is_failure.any() if is_recorded else failure is None,
        settings.capacity or None,
        _find_peak(program, simulation, until),
        int(simulation.allocated[:until].max(initial=0)),
        needed,
        None if is_recorded else retries,
        failed,
        after,
        *program.repeated,
    )


def _find_peak(program: Program, simulation: Simulation, until: int = UNLIMITED) -> int:
    starts_empty = len(program.entry) > 0 and program.entry[0] < 0
    before = 0 if starts_empty else program.reserved_before
    return max(before, int(simulation.reserved[:until].max(initial=0)))
