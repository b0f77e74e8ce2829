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

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from etloom.core.errors import AnalysisError, InvalidValue
from etloom.core.text import format_bytes
from etloom.timeline.memory.program import (
    ALLOC,
    FREE,
    Int64Array,
    ModuleCall,
    Program,
    Simulation,
    find_call,
    is_backward,
    list_calls,
    parse_moment,
)
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
"""Number of modules for which checkpointing is tried."""
_MAX_OPERATIONS = 200_000
"""Largest number of operations for which the needed memory is computed: the search takes about 20 simulations."""


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


# Change the recorded program itself: checkpointing of a module, and another batch size.
#
# Both use recorded evidence only: stacks and the order of requests and frees, or a second snapshot.

_NEVER = 1 << 62
_MAX_UNKNOWN = 0.01
"""Largest share of the requested bytes that may have no counterpart in the snapshot of another batch."""
_EXAMPLES = 5


@dataclass
class _Call:
    """A call of a module: its requests, the place of the next request after it, and what its backward pass needs.

    ``held``: requests that are in use after the call and freed in the backward pass, without the result of the call.
    ``again``: the place at which the backward pass needs them again. ``input``: the result of the call before it.
    """

    requests: list[int]
    run: int
    end: int = 0
    result: int | None = None
    input: int | None = None
    held: list[int] = field(default_factory=list)
    again: int = 0


def checkpoint_module(program: Program, module: str) -> Program:
    """Return the program with torch.utils.checkpoint around each call of a module.

    What a call allocates for its backward pass is freed at its end, and allocated again in the backward pass, with the
    call's temporary blocks, before the first of it is needed there. The last block of a call that is in use after it
    counts as its result: it stays, and the result of the call before it, its input, stays until it is needed again.

    Args:
        program: The recorded program; its stacks tell which requests belong to a call.
        module: The line that calls the module, such as model.py:12; or its class or name, if stacks contain modules.

    Raises:
        InvalidValue: No stack contains a call of the module.
        AnalysisError: The recording contains no backward pass of the module.
    """
    stacks = _parse_stacks(program)
    forward = {code: stack for code, stack in stacks.items() if not is_backward(stack)}
    inside = {code: call for code, stack in forward.items() if (call := find_call(stack, module)) is not None}
    if not inside:
        names = ", ".join(rank_module_calls(program)[:_EXAMPLES]) or "none, because it has no Python stacks"
        raise InvalidValue(
            f"no request was recorded in a call of the module {module!r}",
            remedy=f"name a line that calls a module, not one that requests memory; in the recording: {names}",
            option="memory",
        )
    calls = _find_calls(program, inside)
    is_request = program.action == ALLOC
    in_backward = np.flatnonzero(is_request & ~np.isin(_codes(program), list(forward)))
    freed_at = _find_frees(program)
    _find_held(program, calls, in_backward, freed_at)
    calls = [call for call in calls if call.held]
    if not calls:
        raise AnalysisError(
            f"the recording contains no backward pass that needs what a call of {module} allocates",
            remedy="record a whole training step",
        )
    return _rebuild(program, calls, freed_at)


def rank_module_calls(program: Program) -> list[str]:
    """Return the lines and classes of modules whose calls request memory, most requested bytes first."""
    sums: Counter[str] = Counter()
    sizes = np.where(program.action == ALLOC, program.value, 0)
    by_code = (
        pl.DataFrame({"code": _codes(program), "bytes": sizes}).group_by("code").agg(pl.col("bytes").sum())
    )
    requested = dict(by_code.iter_rows())
    for code, stack in _parse_stacks(program).items():
        for call in dict.fromkeys(list_calls(stack)):
            sums[call] += requested.get(code, 0)
    return [name for name, _ in sums.most_common()]


def _codes(program: Program) -> Int64Array:
    """Return a number for each distinct stack of the operations, -1 for none."""
    return program.stack.to_physical().cast(pl.Int64).fill_null(-1).to_numpy()


def _parse_stacks(program: Program) -> dict[int, list[str]]:
    """Return the frames of each number of `_codes`."""
    distinct = program.stack.unique()
    texts = distinct.cast(pl.String).fill_null("[]").to_list()
    codes = distinct.to_physical().cast(pl.Int64).fill_null(-1).to_list()
    return {code: json.loads(text) for code, text in zip(codes, texts, strict=True)}


def _find_frees(program: Program) -> Int64Array:
    """Return the operation that frees each request; `_NEVER` for none."""
    freed_at = np.full(len(program.action), _NEVER, np.int64)
    frees = np.flatnonzero((program.action == FREE) & (program.value >= 0))
    freed_at[program.value[frees]] = frees
    return freed_at


def _find_calls(program: Program, inside: dict[int, ModuleCall]) -> list[_Call]:
    """Return the calls of a module in their order; calls of one ``run`` follow each other directly.

    A call begins where another module is named, or the forward returns to the line with which it began; if all requests
    are made by one line, to the stack with which it began.
    """
    requests = np.flatnonzero(program.action == ALLOC)
    codes = _codes(program)[requests]
    members = np.flatnonzero(np.isin(codes, list(inside)))
    calls: list[_Call] = []
    for run, places in enumerate(np.split(members, np.flatnonzero(np.diff(members) > 1) + 1)):
        parts = [inside[code] for code in codes[places].tolist()]
        has_lines = parts[0].is_named or len({part.entry for part in parts}) > 1
        keys = [part.entry if has_lines else part.inner for part in parts]
        for i, request in enumerate(requests[places].tolist()):
            if i == 0 or (keys[i] != keys[i - 1] and (parts[i].is_named or keys[i] == keys[0])):
                calls.append(_Call([], run))
            calls[-1].requests.append(request)
    ends = np.append(requests, len(program.action))
    for call in calls:
        call.end = int(ends[np.searchsorted(requests, call.requests[-1]) + 1])
    return calls


def _find_held(program: Program, calls: list[_Call], in_backward: Int64Array, freed_at: Int64Array) -> None:
    """Set what each call holds for its backward pass, its result, and where the backward pass needs the call again."""
    first = sorted({call.run: call.requests[0] for call in reversed(calls)}.values())
    for number, call in enumerate(calls):
        alive = [request for request in call.requests if freed_at[request] >= call.end]
        call.result = alive[-1] if alive else None
        if number and calls[number - 1].run == call.run:
            call.input = calls[number - 1].result
        place = int(np.searchsorted(in_backward, call.end))
        if place == len(in_backward):
            continue
        start = int(in_backward[place])
        later = bisect_right(first, start)
        next_run = first[later] if later < len(first) else len(program.action)
        call.held = [r for r in alive if r != call.result and start < freed_at[r] < next_run]
        if call.held:
            of_call = set(call.requests)
            call.again = min(int(freed_at[request]) for request in call.held)
            while call.again > start and not (
                program.action[call.again - 1] == FREE
                and program.value[call.again - 1] < start
                and int(program.value[call.again - 1]) not in of_call
            ):
                call.again -= 1


def _rebuild(program: Program, calls: list[_Call], freed_at: Int64Array) -> Program:
    """Return the program that frees what each call holds at its end, and requests it again where it is needed.

    An operation of the new program is: the place in the recording before which it comes, the operation that it repeats,
    the request that it frees, and, of a request, its number: requests of the recording keep it, others get new ones.
    """
    count = len(program.action)
    owner = np.where(program.action == FREE, program.value, 0)
    is_kept = np.ones(count, np.bool_)
    inserted: list[tuple[int, int, int, int]] = []
    number, repeated, spans = count, 0, 0
    for call in calls:
        last, held = call.held[-1], set(call.held)
        inserted += [(call.end, int(freed_at[request]), request, -1) for request in call.held]
        copies = {
            r: i
            for i, r in enumerate((r for r in call.requests if r <= last and freed_at[r] < _NEVER), number)
        }
        number += len(copies)
        repeated += len(copies)
        copied = [(request, request, False) for request in copies]
        copied += [(min(int(freed_at[r]), call.end), r, True) for r in copies if r not in held]
        for _, request, is_free in sorted(copied):
            source = int(freed_at[request]) if is_free else request
            inserted.append((call.again, source, copies[request], -1 if is_free else copies[request]))
        for request in call.held:
            owner[freed_at[request]] = copies[request]
        if call.input is not None and freed_at[call.input] < call.again:
            is_kept[freed_at[call.input]] = False
            inserted.append((call.again, int(freed_at[call.input]), call.input, -1))
        if program.time.null_count() == 0:
            spans += int(program.time[last] - program.time[call.requests[0]])
    remaining = np.flatnonzero(is_kept)
    rows = np.concatenate(
        [np.array(inserted, np.int64), np.stack([remaining, remaining, owner[remaining], remaining], axis=1)]
    )
    # What is inserted at a place comes before the operation there.
    places, source, owners, numbers = rows[np.argsort(rows[:, 0], kind="stable")].T
    new_place = np.full(number, -1, np.int64)
    new_place[numbers[numbers >= 0]] = np.flatnonzero(numbers >= 0)
    action = program.action[source]
    is_owned = (action == FREE) & (owners >= 0)
    value = np.where(action == FREE, owners, program.value[source])
    value[is_owned] = new_place[owners[is_owned]]
    at = np.minimum(places, count - 1)
    return replace(
        program, entry=program.entry[source], time=program.time[at], stack=program.stack[source], action=action,
        value=value, stream=program.stream[source], pool=program.pool[source],
        is_explicit=program.is_explicit[source], is_failure=program.is_failure[source],
        repeated=(program.repeated[0] + repeated, None if program.time.null_count() else spans),
    )  # fmt: skip


def scale_batch(program: Program, other: Program | None, factor: float) -> Program:
    """Return the program with a batch of ``factor`` times the size.

    A second recording of the same program with another batch shows which sizes grow, and by how much: the n-th request
    with a stack corresponds to the n-th request with the same stack. The ratio of the batches is the median ratio of
    changed sizes, weighted by bytes. Each size is a constant plus a part that is proportional to the batch.

    Args:
        program: The recorded program.
        other: The program recorded with another batch.
        factor: New batch size, relative to the recorded one.

    Raises:
        AnalysisError: No second recording was given, its batch is the same, or its program differs: more than 1 % of
            the bytes have no counterpart, or do not grow with the batch as the others do.
    """
    if other is None:
        raise AnalysisError(
            "a snapshot does not contain which sizes grow with the batch",
            remedy="record another one with another batch, and name it with --other-batch",
        )
    sizes, others = (_number_requests(each) for each in (program, other))
    sizes = sizes.with_columns(count=pl.len().over("stack"))
    others = others.with_columns(count=pl.len().over("stack")).rename({"bytes": "other"})
    pairs = sizes.join(others, on=("stack", "number", "count"), how="left", maintain_order="left")
    ratio = pl.col("other") / pl.col("bytes")
    changed = pairs.filter(pl.col("other") != pl.col("bytes")).select("bytes", ratio=ratio).sort("ratio")
    if not changed.height and not pairs["other"].has_nulls():
        raise AnalysisError(
            "the other snapshot has the same sizes", remedy="record it with another size of the batch"
        )
    half = changed.filter(pl.col("bytes").cum_sum() * 2 >= pl.col("bytes").sum())["ratio"]
    median = half[0] if len(half) else np.inf
    growing = (pl.col("other") - pl.col("bytes")) / (median - 1)
    pairs = pairs.with_columns(growing=pl.when(growing.is_between(0, pl.col("bytes") * 1.01)).then(growing))
    unknown = pairs.filter(pl.col("growing").is_null())
    before = [int(each.blocks.requested.sum()) for each in (program, other)]
    unknown_bytes = int(unknown["bytes"].sum()) + abs(before[0] - before[1])
    if unknown_bytes > _MAX_UNKNOWN * (int(pairs["bytes"].sum()) + before[0]):
        raise AnalysisError(
            "the other snapshot is not of the same program with another batch: requests and blocks from before, of "
            f"{format_bytes(unknown_bytes)} in all, have no counterpart that grows as the others do",
            remedy="record the same steps of both, from their beginning",
        )
    grown = pl.col("bytes") + (pl.col("growing") * (factor - 1)).fill_null(0)
    value = program.value.copy()
    value[program.action == ALLOC] = pairs.select(grown.round().clip(1).cast(pl.Int64)).to_series().to_numpy()
    return replace(program, value=value)


def _number_requests(program: Program) -> pl.DataFrame:
    """Return stack, number among the requests with it, and bytes, of each request."""
    requests = program.action == ALLOC
    table = pl.DataFrame(
        {
            "stack": program.stack.filter(pl.Series(requests)).cast(pl.String).fill_null(""),
            "bytes": program.value[requests],
        }
    )
    return table.with_columns(number=pl.int_range(pl.len()).over("stack"))
