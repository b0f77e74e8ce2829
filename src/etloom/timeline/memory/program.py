"""The requests of a device to its caching allocator, as a memory snapshot recorded them, and their simulation.

A `Program` has what `etloom._native.run_allocator` needs: the operations (requests, frees, empty_cache), the segments
and blocks from before the history, and the addresses that the driver returned. What was there before follows from the
contents at the snapshot and the history, backwards.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from etloom import _native
from etloom.core.errors import AnalysisError, InvalidValue
from etloom.core.text import count_noun, format_bytes, parse_time_range
from etloom.core.trace import Trace
from etloom.timeline.memory.settings import Settings, read_settings

ALLOC, FREE, EMPTY_CACHE, RELEASE_POOL = range(4)
"""Operations of a program; `native/allocator.cpp` has the same numbers."""
DRIVER_EVENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap", "retry", "oom")
NO_OWNER = -(1 << 62)
_EVENT_COLUMNS = ("operation", "kind", "addr", "bytes")
_BLOCK_COLUMNS = (
    *("addr", "bytes", "requested", "owner", "segment"),
    *("stream", "pool", "is_small", "is_expandable"),
)
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_NEED_ADDRESS = (
    *("alloc", "free_requested", "free_completed", "segment", "block"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
)
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_NEVER = 1 << 62
_MOST_MAPPED = 1 << 46
"""Most bytes that a history maps and unmaps in all: a longer one is damaged, and would be walked for hours."""
Int64Array = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class Segments(NamedTuple):
    """Segments from before the history, by address; ``space``: address space of an expandable one, otherwise 0."""

    address: Int64Array
    size: Int64Array
    stream: Int64Array
    pool: Int64Array
    is_small: Int64Array
    space: Int64Array


class Blocks(NamedTuple):
    """Blocks in use from before the history, by address: their size, and the bytes that were requested."""

    address: Int64Array
    size: Int64Array
    requested: Int64Array


MOMENTS = ("peak", "reserved-peak", "end", "oom")
"""Named moments of a program, see `Program.find_operation`."""


def parse_moment(text: str, option: str = "at") -> int | None:
    """Return the time after the first operation, ns, of text such as 1.5s; None for one of `MOMENTS`.

    Raises:
        InvalidValue: The text is neither.
    """
    if text in MOMENTS:
        return None
    try:
        return parse_time_range(f"{text}:")[0]
    except InvalidValue:
        raise InvalidValue(
            f"unknown moment {text!r}; expected {', '.join(MOMENTS)}, or a time such as 1.5s", option=option
        ) from None


@dataclass(frozen=True)
class Simulation:
    """The actions of the allocator on the operations of a program.

    ``address`` (-1: none), ``reserved``, ``allocated`` (blocks in use), ``requested`` and ``releasable`` (free bytes
    that empty_cache() would return to the driver) have one value per operation: the bytes after it. ``events``:
    operation, kind (`DRIVER_EVENTS`), addr, bytes. ``blocks``: the blocks at the end (addr, bytes, requested, owner,
    segment, stream, pool, is_small, is_expandable); ``owner`` is the operation, -1 - i for block i from before, and
    `NO_OWNER` for a free block.
    """

    address: Int64Array
    reserved: Int64Array
    allocated: Int64Array
    requested: Int64Array
    releasable: Int64Array
    events: pl.DataFrame
    blocks: pl.DataFrame

    @property
    def reserved_peak(self) -> int:
        """The operation with most reserved memory; of several the one with most memory in use."""
        return int(np.where(self.reserved == self.reserved.max(), self.allocated, -1).argmax())

    @property
    def first_failure(self) -> int | None:
        """The first operation that ran out of memory."""
        failures = self.events.filter(pl.col("kind") == "oom")["operation"]
        return int(failures[0]) if len(failures) else None


@dataclass(frozen=True)
class Program:
    """The operations of a device in their order: ``entry`` is the row of the table `allocator` that recorded each.

    ``value``: requested bytes, or the operation whose block is freed (-1 - i: block i from before). ``is_explicit``: of
    EMPTY_CACHE whether the program called it, not the allocator itself before it ran out of memory. ``is_failure``: of
    ALLOC whether it ran out of memory in the recording. ``stack``: JSON lists of frames, null for none. ``repeated``:
    requests that a change made again, and the recorded time from the first to the last of each repeated part.
    ``recorded_reserved``: reserved memory at its peak and at the end, as recorded; None if it was not.
    """

    device: int
    entry: Int64Array
    time: pl.Series
    stack: pl.Series
    action: np.ndarray[Any, np.dtype[np.uint8]]
    value: Int64Array
    stream: Int64Array
    pool: Int64Array
    is_explicit: BoolArray
    is_failure: BoolArray
    segments: Segments
    blocks: Blocks
    driver: tuple[Int64Array, Int64Array]
    settings: Settings
    recorded_reserved: tuple[int, int] | None = None
    repeated: tuple[int, int | None] = (0, None)

    @property
    def reserved_before(self) -> int:
        return int(self.segments.size.sum())

    def describe_doubt(self) -> str | None:
        """Return in one sentence how the simulation of the recording differs from it; None if it does not."""
        if self.recorded_reserved is None or not len(self.action):
            return None
        reserved = self.run().reserved
        peak, end = max(self.reserved_before, int(reserved.max())), int(reserved[-1])
        if (peak, end) == self.recorded_reserved:
            return None
        names = ("at its peak", "at the end")
        parts = [
            f"{_tell_apart(simulated, recorded)} {name} instead of {_tell_apart(recorded, simulated)}"
            for name, simulated, recorded in zip(names, (peak, end), self.recorded_reserved, strict=True)
            if simulated != recorded
        ]
        return (
            f"device {self.device}: the simulated allocator reserves {' and '.join(parts)} as recorded, so other "
            "figures may differ as much; older PyTorch does not record which private pools (CUDA graphs) were freed"
        )

    def run(self, settings: Settings | None = None, stop: int = _NEVER) -> Simulation:
        """Simulate the operations before ``stop`` with the recorded settings, or others."""
        chosen = settings or self.settings
        limits = (
            chosen.capacity, chosen.max_split_size, chosen.max_non_split_rounding, chosen.large_segment_size,
            int(chosen.expandable_segments),
        )  # fmt: skip
        after, events, blocks = _native.run_allocator(
            self.action, self.value, self.stream, self.pool.astype(np.int32), tuple(self.segments), tuple(self.blocks),
            self.driver, limits, chosen.garbage_collection_threshold, chosen.roundup_power2_divisions, stop,
        )  # fmt: skip
        log = pl.DataFrame(dict(zip(_EVENT_COLUMNS, events, strict=True))).with_columns(
            pl.col("kind").replace_strict(dict(enumerate(DRIVER_EVENTS)), return_dtype=pl.String)
        )
        ends = pl.DataFrame(dict(zip(_BLOCK_COLUMNS, blocks, strict=True)))
        address, reserved, allocated, requested, releasable = after
        return Simulation(address, reserved, allocated, requested, releasable, log, ends)

    def find_operation(self, moment: str) -> int:
        """Return the number of operations before a moment, with those at it.

        Args:
            moment: peak (most bytes in use), reserved-peak, end, oom (before the first request that failed in the
                recording), or a time after the first operation, such as 1.5s.

        Raises:
            InvalidValue: The moment is unknown.
            AnalysisError: No request failed, or the recording has no times.
        """
        if moment == "end":
            return len(self.action)
        if moment in ("peak", "reserved-peak"):
            simulation = self.run()
            return (int(simulation.allocated.argmax()) if moment == "peak" else simulation.reserved_peak) + 1
        if moment == "oom":
            if not self.is_failure.any():
                raise AnalysisError("no request failed in the recording", remedy="the peak is another moment")
            return int(self.is_failure.argmax())
        after_ns = parse_moment(moment)
        if self.time.null_count():
            raise AnalysisError("the snapshot contains no times", remedy="use peak, reserved-peak or end")
        if after_ns is not None and after_ns > self.time[-1] - self.time[0]:
            raise AnalysisError(f"the recording ends before {moment}", remedy="use end, or an earlier time")
        return int((self.time - self.time[0] <= (after_ns or 0)).sum())

    def without_automatic_releases(self) -> Program:
        """Return the program without the releases of cached memory that the allocator decided on itself."""
        return self._keep((self.action != EMPTY_CACHE) | self.is_explicit)

    def until(self, operation: int) -> Program:
        """Return the operations before one."""
        return self._select(np.arange(operation))

    def with_empty_cache(self, operation: int) -> Program:
        """Return the program with a call of empty_cache() before an operation."""
        order = np.insert(np.arange(len(self.action)), operation, -1)
        return self._select(order)

    def _keep(self, mask: BoolArray) -> Program:
        return self._select(np.flatnonzero(mask))

    def _select(self, order: Int64Array) -> Program:
        """Return the operations in ``order``; -1 is a new EMPTY_CACHE, -1 - p a RELEASE_POOL of the private pool p."""
        is_new = order < 0
        new_number = np.full(len(self.action), -1, np.int64)
        new_number[order[~is_new]] = np.flatnonzero(~is_new)
        action = np.where(is_new, np.where(order < -1, RELEASE_POOL, EMPTY_CACHE), self.action[order]).astype(
            np.uint8
        )
        value = np.where(is_new, -1 - order, self.value[order])
        renumbered = (action == FREE) & (value >= 0)
        value[renumbered] = new_number[value[renumbered]]
        places = np.where(is_new, len(self.action) - 1, order)
        at = np.minimum.accumulate(places[::-1])[::-1]  # of a new operation the place of the next one
        return replace(
            self, entry=np.where(order == -1, -1, self.entry[at]), time=self.time[at], stack=self.stack[at],
            action=action, value=value, stream=self.stream[at], pool=self.pool[at],
            is_explicit=is_new | self.is_explicit[at], is_failure=~is_new & self.is_failure[at],
        )  # fmt: skip


def _tell_apart(size: int, other: int) -> str:
    """Format a number of bytes, exactly if the other one would look the same."""
    return format_bytes(size) if format_bytes(size) != format_bytes(other) else f"{size:,} B"


def find_programs(trace: Trace) -> list[Program]:
    """Return the program of each device whose allocator's history was recorded.

    Raises:
        AnalysisError: The trace contains no such history, or it does not match the segments.
    """
    return list(trace.compute_once(_build_programs))


def _build_programs(trace: Trace) -> tuple[Program, ...]:
    table = trace.allocator
    if not table["action"].is_in(["alloc", "free_completed"]).any():
        raise AnalysisError(
            "the trace contains no history of a caching allocator",
            remedy="record one with torch.cuda.memory._record_memory_history(), and open the snapshot of "
            "torch.cuda.memory._dump_snapshot()",
        )
    settings = read_settings(trace.meta.get("header", {}).get("allocator_settings", {}))
    text = table.with_columns(
        pl.col("action", "kind", "pool").cast(pl.String), pl.col("addr").cast(pl.Int64, strict=False)
    ).with_columns(pl.col("kind").fill_null(""))
    _check_complete(text)
    return tuple(
        _build_program(rows, int(rows["device"][0] or 0), settings)
        for _, rows in text.group_by("device", maintain_order=True)
        if (rows["action"] == "alloc").any() or (rows["action"] == "free_completed").any()
    )


def _check_complete(rows: pl.DataFrame) -> None:
    """Raise AnalysisError if an entry that the simulation needs has no size, or no address."""
    damaged = rows.filter(
        pl.col("action").is_in(_NEED_ADDRESS) & (pl.col("addr").is_null() | pl.col("bytes").is_null())
        | (pl.col("action") == "oom") & pl.col("bytes").is_null()
    )
    if damaged.height:
        raise AnalysisError(
            f"entry {damaged['id'][0]} of the allocator's history has no size, or no address "
            f"({count_noun(damaged.height, 'such entry', 'such entries')})",
            remedy="the snapshot is damaged: record another one",
        )


def _build_program(rows: pl.DataFrame, device: int, settings: Settings) -> Program:
    is_end = pl.col("action").is_in(["segment", "block"])
    history, ends = rows.filter(~is_end), rows.filter(is_end)
    freeing = "free_completed" if (history["action"] == "free_completed").any() else "free_requested"
    operations = _find_operations(history, freeing)
    pools = _number_pools(rows)
    segments = _find_segments(history, ends, pools, settings)
    blocks, numbers = _find_blocks(operations, ends, segments, settings)
    releases = operations["action"].str.starts_with("segment").to_numpy()
    action = np.select(
        [releases, (operations["action"] == freeing).to_numpy()], [EMPTY_CACHE, FREE], ALLOC
    ).astype(np.uint8)
    value = operations["owner"].fill_null(-1).to_numpy().copy()
    value[action == ALLOC] = operations["bytes"].to_numpy()[action == ALLOC]
    first = (action == FREE) & (value < 0)
    value[first] = [-1 - numbers.get(address, _NEVER - 2) for address in operations["addr"].to_numpy()[first]]
    segment_allocs = history.filter(pl.col("action") == "segment_alloc")
    stack = operations["stack"].cast(pl.String).fill_null("emptyCache")
    program = Program(
        device, operations["id"].cast(pl.Int64).to_numpy(), operations["ts"], operations["stack"], action, value,
        operations["stream"].fill_null(0).to_numpy(), _find_pools(operations, history, ends, pools),
        stack.str.contains(r"emptyCache|empty_cache").to_numpy(), (operations["action"] == "oom").to_numpy(),
        segments, blocks,
        (segment_allocs["addr"].to_numpy(), segment_allocs["bytes"].to_numpy()), settings,
        _sum_recorded(history, int(segments.size.sum())),
    )  # fmt: skip
    program = program._select(_insert_pool_releases(history, operations, pools))
    try:
        program.run(stop=0)
    except ValueError:  # segments or blocks overlap, or have impossible sizes
        raise _mismatch() from None
    return program


def _mismatch() -> AnalysisError:
    return AnalysisError(
        "the history of the allocator does not match the segments of the snapshot",
        remedy="record one process, and take the snapshot while the history is still recorded",
    )


def _find_operations(history: pl.DataFrame, freeing: str) -> pl.DataFrame:
    """Return requests, frees and the first entry of each run of releases, with ``owner``: the request that a free
    returns, null if it is from before the history."""
    is_release = pl.col("action").is_in(["segment_free", "segment_unmap"])
    starts_run = is_release & ~is_release.shift(1, fill_value=False)
    is_request = pl.col("action").is_in(["alloc", "oom"])
    operations = history.filter(is_request | (pl.col("action") == freeing) | starts_run).with_columns(
        operation=pl.int_range(pl.len(), dtype=pl.Int64)
    )
    at_address = operations.filter(pl.col("action").is_in(["alloc", freeing])).select(
        "operation",
        owner=pl.col("operation").shift(1).over("addr"),
        is_last=pl.col("action").shift(-1).over("addr").is_null(),
    )
    return operations.join(at_address, on="operation", how="left", maintain_order="left")


def _number_pools(rows: pl.DataFrame) -> dict[str, int]:
    names = rows["pool"].drop_nulls().unique(maintain_order=True)
    return {name: number for number, name in enumerate(names, 1)}


def _find_segments(
    history: pl.DataFrame, ends: pl.DataFrame, pools: dict[str, int], settings: Settings
) -> Segments:
    """Return the segments from before the history: those at its end that it does not take, and those that it returns
    before it takes them."""
    changes = history.filter(pl.col("action").is_in(["segment_alloc", "segment_free"]))
    returned = changes.group_by("addr", maintain_order=True).first()
    returned = returned.filter(pl.col("action") == "segment_free").with_columns(
        kind=pl.when(pl.col("bytes") <= _SMALL_SEGMENT).then(pl.lit("small")).otherwise(pl.lit("large"))
    )
    at_end = ends.filter(pl.col("action") == "segment")
    fixed = at_end.filter(~pl.col("kind").str.contains("expandable"))
    unchanged = fixed.join(changes.select("addr").unique(), on="addr", how="anti")
    growing = _find_mapped(history, at_end.filter(pl.col("kind").str.contains("expandable")))
    columns = ("addr", "bytes", "stream", "pool", "kind")
    segments = pl.concat([unchanged.select(columns), returned.select(columns), *growing]).sort("addr")
    address, size = segments["addr"].to_numpy(), segments["bytes"].to_numpy()
    is_expandable = segments["kind"].str.contains("expandable").to_numpy()
    room = np.append(address[1:], _NEVER) - address
    capacity = settings.capacity or 1 << 42
    return Segments(
        address, size, segments["stream"].fill_null(0).to_numpy(),
        np.array([pools.get(name, 0) for name in segments["pool"]], np.int64),
        segments["kind"].str.contains("small").cast(pl.Int64).to_numpy(),
        np.where(is_expandable, np.maximum(np.minimum(room, capacity + capacity // 8), size), 0),
    )  # fmt: skip


def _find_mapped(history: pl.DataFrame, at_end: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the mapped ranges of expandable segments from before the history, each as a segment."""
    page = _SMALL_SEGMENT
    changes = history.filter(pl.col("action").is_in(["segment_map", "segment_unmap"]))
    mapped = pl.concat([at_end["bytes"], changes["bytes"]]).cast(pl.Float64)
    if mapped.abs().sum() > _MOST_MAPPED:  # a damaged file may state negative sizes
        raise _mismatch()
    pages: dict[int, tuple[int | None, str | None, str | None]] = {}
    for row in at_end.iter_rows(named=True):
        for start in range(row["addr"], row["addr"] + row["bytes"], page):
            pages[start] = (row["stream"], row["pool"], row["kind"])
    for row in changes.reverse().iter_rows(named=True):
        for start in range(row["addr"], row["addr"] + row["bytes"], page):
            if row["action"] == "segment_map":
                pages.pop(start, None)
            else:  # the page's kind is not recorded: pages of the large pool come in tens
                kind = "large expandable" if row["bytes"] % (10 * page) == 0 else "small expandable"
                pages[start] = (row["stream"], None, kind)
    rows: list[list[Any]] = []
    for start, facts in sorted(pages.items()):
        if rows and rows[-1][0] + rows[-1][1] == start and tuple(rows[-1][2:]) == facts:
            rows[-1][1] += page
        else:
            rows.append([start, page, *facts])
    if rows:
        yield pl.DataFrame(
            rows, schema=at_end.select("addr", "bytes", "stream", "pool", "kind").schema, orient="row"
        )


def _find_blocks(
    operations: pl.DataFrame, ends: pl.DataFrame, segments: Segments, settings: Settings
) -> tuple[Blocks, dict[int, int]]:
    """Return the blocks in use before the history, and the number of each by its address.

    A block that the history frees has no recorded size. It follows from what is around it: in the large pool the
    allocator leaves no rest of 1 MiB or less, so a smaller gap belongs to the block.

    Raises:
        AnalysisError: A block is outside of the segments, or overlaps another.
    """
    freed = operations.filter(
        pl.col("owner").is_null() & pl.col("action").is_in(["free_completed", "free_requested"])
    )
    in_use = ends.filter((pl.col("action") == "block") & pl.col("kind").is_in(_IN_USE))
    unchanged = in_use.join(
        operations.filter(pl.col("action") != "oom").select("addr"), on="addr", how="anti"
    )
    columns = ("addr", "bytes", "rounded")
    blocks = pl.concat(
        [freed.with_columns(rounded=pl.lit(None, pl.Int64)).select(columns), unchanged.select(columns)]
    )
    blocks = blocks.sort("addr")
    address, requested = blocks["addr"].to_numpy(), blocks["bytes"].fill_null(0).to_numpy()
    place = np.searchsorted(segments.address, address, side="right") - 1
    inside = place >= 0
    end = np.where(inside, (segments.address + segments.size)[place] if len(segments.address) else 0, 0)
    room = np.minimum(np.append(address[1:], _NEVER), end) - address
    rounded = np.array([settings.round_size(size) for size in requested.tolist()], np.int64)
    is_cut = (segments.is_small + segments.space)[place] > 0 if len(segments.address) else inside
    takes_rest = ~is_cut & ((room - rounded <= _SMALL) | (rounded >= settings.max_split_size))
    size = blocks["rounded"].fill_null(pl.Series(np.where(takes_rest, room, rounded))).to_numpy()
    if (size > room).any() or (requested > size).any() or not inside.all():
        raise _mismatch()
    return Blocks(address, size, requested), {int(start): number for number, start in enumerate(address)}


def _find_pools(
    operations: pl.DataFrame, history: pl.DataFrame, ends: pl.DataFrame, pools: dict[str, int]
) -> Int64Array:
    """Return the private pool of each operation: as recorded (PyTorch 2.13), or else the pool of the segment at the
    operation's address, from the entry that allocates the segment on."""
    if history["pool"].null_count() < history.height:
        stated = operations["pool"].replace_strict(pools, default=0, return_dtype=pl.Int64)
        return stated.fill_null(0).to_numpy()
    numbers = np.zeros(operations.height, np.int64)
    private = ends.filter((pl.col("action") == "segment") & pl.col("pool").is_not_null())
    if not private.height:
        return numbers
    takes = history.filter(pl.col("action") == "segment_alloc").group_by("addr").agg(pl.col("id").max())
    since = dict(takes.iter_rows())
    address = operations["addr"]
    for row in private.iter_rows(named=True):
        start = row["addr"]
        inside = (
            (address >= start) & (address < start + row["bytes"]) & (operations["id"] >= since.get(start, 0))
        )
        numbers[inside.fill_null(False).to_numpy()] = pools[row["pool"]]
    return numbers


def _insert_pool_releases(
    history: pl.DataFrame, operations: pl.DataFrame, pools: dict[str, int]
) -> Int64Array:
    """Return the order of the operations as their numbers, with releases of private pools inserted (-1 - pool number).
    A release precedes the first free of a segment of the pool: the allocator keeps the segments of a pool in use."""
    order = np.arange(operations.height)
    releases = history.filter(
        pl.col("action").is_in(["segment_free", "segment_unmap"]) & pl.col("pool").is_not_null()
    )
    first = releases.group_by("pool", maintain_order=True).first()
    # The operation of a release is the first entry of its run.
    at = np.searchsorted(operations["id"].to_numpy(), first["id"].to_numpy(), side="right") - 1
    return np.insert(order, at, [-1 - pools[name] for name in first["pool"]])


def _sum_recorded(history: pl.DataFrame, before: int) -> tuple[int, int] | None:
    """Return the recorded reserved memory at its peak and at the end; None if no change of it was recorded."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    changes = history.filter(pl.col("action").is_in(list(signs)))
    if not changes.height:
        return None
    sizes = changes["bytes"] * changes["action"].replace_strict(signs, return_dtype=pl.Int64)
    reserved = before + sizes.cum_sum()
    return max(before, int(reserved.to_numpy().max())), int(reserved[-1])


# The stacks of requests: which line, module or operator of the program made them.

PYTHON = re.compile(r"\.py:\d+\)$|<(?:string|stdin|ipython[^>]*)>:\d+\)$")
BACKWARD = re.compile(r"\b(\w*Backward\w*)::apply\b")
_OPERATOR = re.compile(r"\b(at::_ops::\w+)::")
"""Match the frames of C++ of a backward node and of an operator."""
TORCH = re.compile(r"[(/]torch/[^ ]*\.py:\d+\)$")


def find_line(stack: list[str]) -> str | None:
    """Return a stack's innermost Python frame outside of torch, else its innermost Python frame, else the backward node
    or the operator that allocated; None if it has none of them.

    The innermost frames of C++ are those that gather the stack and allocate: they say nothing about the program.
    """
    python = [frame for frame in stack if PYTHON.search(frame)]
    user = [frame for frame in python if not TORCH.search(frame)]
    # A stack without a frame of C++ names its places itself.
    other = [] if any("::" in frame for frame in stack) else stack
    operator = find_operator(stack)
    return next(iter([*user, *python, *([operator] if operator else []), *other]), None)


def find_operator(stack: list[str]) -> str | None:
    """Return the backward node or else the operator of a stack; None if C++ was not recorded."""
    native = [match[1] for p in (BACKWARD, _OPERATOR) for frame in stack if (match := p.search(frame))]
    return native[0] if native else None


def find_module(stack: list[str]) -> str | None:
    """Return the innermost module that the stack names, or else the innermost ``forward``, if possible outside of
    torch, or else the function of `find_line` (the optimizer's ``step``, a loss), both with their files; without Python
    frames the backward node or operator."""
    if named := [match for frame in stack if (match := _MODULE.match(frame))]:
        return f"{named[0][1]} ({named[0][2]})".lstrip()
    forward = [frame for frame in stack if frame.startswith("forward (")]
    user = [frame for frame in forward if not TORCH.search(frame)]
    place = next(iter([*user, *forward]), find_line(stack))
    return None if place is None else re.sub(r":\d+\)$", ")", place)


PLACES: dict[str, Callable[[list[str]], str | None]] = {
    "line": find_line,
    "module": find_module,
    "operator": find_operator,
}


class ModuleCall(NamedTuple):
    """A call of a module in a stack.

    ``entry``: the module's name if the stack has one, else the frame of the module's forward. ``inner``: the frames
    inside of the call. ``is_named``: ``entry`` is a name; a frame of forward is the same for all modules of a class.
    """

    entry: str
    inner: tuple[str, ...]
    is_named: bool


def find_call(stack: list[str], module: str) -> ModuleCall | None:
    """Return the outermost call of a module in a stack, None if the stack has none.

    Args:
        stack: Frames, innermost first.
        module: The line that calls the module (model.py:12), or, if the frames name modules, a class or a name.
    """
    for place in reversed(range(len(stack))):
        if (match := _MODULE.match(stack[place])) and module in match.groups():
            return ModuleCall(match[1], tuple(stack[:place]), is_named=True)
        if stack[place].endswith((f"({module})", f"/{module})")):
            inner = [frame for frame in stack[:place] if PYTHON.search(frame) and not _CALL.match(frame)]
            if inner and inner[-1].startswith("forward ("):
                return ModuleCall(inner[-1], tuple(inner), is_named=False)
    return None


def list_calls(stack: list[str]) -> list[str]:
    """Return the lines of a stack that call a module, with their files' names only, and the classes of modules."""
    classes = [match[2] for frame in stack if (match := _MODULE.match(frame))]
    python = [frame for frame in stack if PYTHON.search(frame) and not _CALL.match(frame)]
    lines = [
        caller.rpartition("(")[2].rpartition("/")[2].rstrip(")")
        for called, caller in itertools.pairwise(python)
        if called.startswith("forward (")
    ]
    return [*classes, *lines]


def is_backward(stack: list[str]) -> bool:
    """Return whether a request belongs to a backward pass: it names a node, or its thread runs no Python."""
    return not any(map(PYTHON.search, stack)) or any(map(BACKWARD.search, stack))


_CALL = re.compile(r"(?:_call_impl|_wrapped_call_impl|new_forward) \(")
_MODULE = re.compile(r"module (.*) \((\w+):0\)$")
"""The frame that the forecast without a GPU adds for a module: its name and class."""
