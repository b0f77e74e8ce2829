"""Runs the planned calls of one rank with torch.distributed; measures when each is issued, returns and completes."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from etloom.core.errors import EtloomError
from etloom.core.machine import available_memory
from etloom.core.text import format_ranks
from etloom.replayer.comms.comms_options import CommsOptions, check_backend
from etloom.replayer.comms.distributed_calls import (
    PreparedCall,
    expected_results,
    make_process_groups,
    start_messages,
    tensor_element_counts,
    torch_dtype,
    verification_value,
)
from etloom.replayer.launch_environment import Process, ranks_on_host
from etloom.replayer.plan import Call, RankPlan

_Check = Callable[[PreparedCall], None]


@dataclass(frozen=True)
class CallTimes:
    """Times of a rank's calls and repeats in a replay, in ns on the monotonic clock of the rank's host.

    Attributes:
        issued, returned, completed: [repeat, call] when the call was issued, returned, and completed.
        zero: When all ranks started the first repeat.
        span: [repeat] duration from the first call to the end of the last.
        blocked: [repeat] part of the span in which the host waited.
    """

    issued: np.ndarray
    returned: np.ndarray
    completed: np.ndarray
    zero: int
    span: np.ndarray
    blocked: np.ndarray


class Runner:
    """Runs the calls of one rank, with their process groups and buffers, in warm-up and timed passes.

    Attributes:
        position: Index of the current call.

    Args:
        run_operators: Called with a node to run the rank's operators before it, and with None at the end. Calls are
            then waited for among the operators, as planned (`Call.wait_before_node`).
    """

    def __init__(
        self,
        plan: RankPlan,
        process: Process,
        options: CommsOptions,
        run_operators: Callable[[int | None], None] | None = None,
    ) -> None:
        self.options = options
        self.process = process
        self.calls: Sequence[Call] = plan.calls
        self.position = 0
        self._run_operators = run_operators
        self._device = torch.device(options.device)
        if options.device == "cuda":
            self._device = torch.device("cuda", gpu_index(process))
        groups = make_process_groups(plan.groups, plan.world_size, timedelta(seconds=options.timeout_s))
        self._waits = (
            _blocking_waits(self.calls) if options.blocking else [call.waits_for for call in self.calls]
        )
        self._waits_before_nodes = {} if run_operators is None else _waits_before_nodes(self.calls)
        # The backend is asked for the end of calls that are not waited for at once.
        self._in_flight = set(range(len(self.calls)))
        if run_operators is None:
            waited_at_once = {
                earlier
                for index, waits in enumerate(self._waits)
                for earlier in waits
                if earlier == index - 1
            }
            self._in_flight -= {len(self.calls) - 1, *waited_at_once}
        batch = options.device == "cuda" if options.batch is None else options.batch
        self._batches = _message_batches(self.calls, self._waits) if batch else {}
        tensors = allocate_buffers(self.calls, self._waits, process.rank, self._device, options.backend)
        self._prepared = [
            PreparedCall(call, groups.get(call.group), *call_tensors)
            for call, call_tensors in zip(self.calls, tensors, strict=True)
        ]
        self._clock = Clock(self._device)
        self._fill_gap = _make_busy_loop(self._device) if options.gap == "load" else None

    def describe_position(self) -> str:
        """Describe the current call for messages: index, collective, bytes and partner ranks."""
        if self.position >= len(self.calls):
            return "the end of a repeat"
        call = self.calls[self.position]
        partners = f"rank {call.peer}" if call.peer is not None else format_ranks(call.group)
        return f"call {call.index} ({call.collective}, {call.bytes:,} B, with {partners})"

    def run(self) -> CallTimes:
        """Run the verification pass, if requested, the warm-up passes and all repeats; return the times of the repeats.

        Raises:
            EtloomError: A result is wrong (``verify``).
            RuntimeError: torch.distributed failed.
        """
        if self.options.verify:
            self._run_pass(self._check_result)
        for _ in range(self.options.warmup):
            self._run_pass(None)
        times = []
        spans = []
        zero = 0
        for repeat in range(self.options.repeats):
            dist.barrier()
            begin = time.monotonic_ns()
            zero = zero if repeat else begin
            times.append(self._run_pass(None))
            spans.append((time.monotonic_ns() - begin, self._clock.blocked_ns))
        issued, returned, completed = (
            np.array([pass_times[column] for pass_times in times], dtype=np.int64) for column in range(3)
        )
        span, blocked = np.array(spans, dtype=np.int64).T
        return CallTimes(issued, returned, completed, zero, span, blocked)

    def _run_pass(self, check: _Check | None) -> tuple[list[int], list[int], list[int]]:
        """Run all calls once; return the times (ns) at which each call was issued, returned and completed."""
        count = len(self.calls)
        issued, returned = [0] * count, [0] * count
        pending: dict[int, Any] = {}
        clock = self._clock
        clock.begin(count)
        keeps_gaps = self.options.timing == "recorded" and check is None
        target = time.monotonic_ns()
        for index, (prepared, waits) in enumerate(zip(self._prepared, self._waits, strict=True)):
            self._run_operators_before(index, pending, check)
            for earlier in waits:
                self._complete(earlier, pending, check)
            self.position = index
            if keeps_gaps:
                target += prepared.call.gap_ns or 0
                self._pause_until(target)
            if index in pending:  # started in the batch of an earlier message
                continue
            batch = self._batches.get(index, range(index, index + 1))
            if check:
                self._fill_inputs(batch)
            for message in batch:
                issued[message] = time.monotonic_ns()
            works = (
                [prepared.start()]
                if len(batch) == 1
                else start_messages([self._prepared[message] for message in batch])
            )
            for message, work in zip(batch, works, strict=True):
                pending[message] = work
                returned[message] = time.monotonic_ns()
                if message in self._in_flight:
                    clock.watch(message, work)
        self._run_operators_before(count, pending, check)
        for index in list(pending):
            self._complete(index, pending, check)
        self.position = count
        return issued, returned, clock.finish()

    def _fill_inputs(self, indices: range) -> None:
        """Fill the tensors of the calls at ``indices`` with this rank's `verification_value`."""
        for index in indices:
            for tensor in self._prepared[index].tensors:
                tensor.fill_(verification_value(self.process.rank, tensor.dtype, self.process.world_size))

    def _run_operators_before(self, index: int, pending: dict[int, Any], check: _Check | None) -> None:
        """Run the operators before a call (or all remaining operators), with the planned waits for earlier calls."""
        self.position = min(index, len(self.calls) - 1)
        if self._run_operators is None:
            return
        for node, earlier in self._waits_before_nodes.get(index, ()):
            self._run_operators(node)
            self._complete(earlier, pending, check)
        self._run_operators(None if index == len(self.calls) else self.calls[index].node or 0)

    def _complete(self, index: int, pending: dict[int, Any], check: _Check | None) -> None:
        """Wait until a pending call completes, and check its result; do nothing if it is no longer pending."""
        if index not in pending:
            return
        self.position = index
        self._clock.wait(index, pending.pop(index))
        if check:
            check(self._prepared[index])

    def _pause_until(self, target: int) -> None:
        while time.monotonic_ns() < target:
            if self._fill_gap is not None:
                self._fill_gap()

    def _check_result(self, prepared: PreparedCall) -> None:
        for tensor, expected in expected_results(prepared, self.process.rank, self.process.world_size):
            is_equal = tensor == expected
            if prepared.reduce_op == "avg" and tensor.is_floating_point():
                # Each summand may be divided before the sum: one rounding each.
                tolerance = 4 * torch.finfo(tensor.dtype).eps
                is_equal |= (tensor.float() - expected.float()).abs() <= tolerance * expected.float().abs()
            if wrong := int(is_equal.logical_not().sum()):
                raise EtloomError(
                    f"{self.describe_position()} returned {wrong:,} wrong elements of {tensor.numel():,}"
                )


def _blocking_waits(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """Return per call of a blocking replay the calls to wait for first: the preceding collective, and planned waits.

    Two ranks that send to each other would both wait if messages were waited for at once.
    """
    waits = []
    for call in calls:
        previous = {call.index - 1} if call.index and calls[call.index - 1].peer is None else set()
        waits.append(tuple(sorted(previous.union(call.waits_for))))
    return waits


def _waits_before_nodes(calls: Sequence[Call]) -> dict[int, list[tuple[int, int]]]:
    """Return the waits for earlier calls that take place between the operators before each call.

    Returns:
        Index of a call (or the number of calls, for the end) -> (node, index of the call that is waited for), ordered
        by node.
    """
    waits: dict[int, list[tuple[int, int]]] = {}
    nodes = [call.node or 0 for call in calls]
    for call in calls:
        if call.wait_before_node is not None:
            later = bisect_left(nodes, call.wait_before_node)
            waits.setdefault(later, []).append((call.wait_before_node, call.index))
    return {index: sorted(pairs) for index, pairs in waits.items()}


def _message_batches(calls: Sequence[Call], waits: Sequence[tuple[int, ...]]) -> dict[int, range]:
    """Group consecutive sends and receives that have no waits between them; return first index -> range of indices."""
    batches: dict[int, range] = {}
    first = 0
    for index, call in enumerate(calls):
        if call.peer is None or calls[first].peer is None or waits[index]:
            first = index
        elif index > first:
            batches[first] = range(first, index + 1)
    return batches


def _make_busy_loop(device: torch.device) -> Callable[[], None]:
    """Return a function that multiplies two small matrices, which takes about 10 µs on a host core."""
    matrix = torch.randn(64, 64, device=device)

    def multiply() -> None:
        torch.mm(matrix, matrix)

    return multiply


def gpu_index(process: Process) -> int:
    """Return the GPU that a process uses: its local rank modulo the number of GPUs that are visible to it."""
    return process.local_rank % torch.cuda.device_count()


@contextmanager
def process_group(process: Process, store: Any, options: CommsOptions) -> Iterator[None]:
    """Context manager: initialize torch's default process group with a key-value store; destroy it at the end.

    Raises:
        EtloomError: This torch does not have the backend, or no GPU.
    """
    check_backend(options.backend)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise EtloomError("torch finds no GPU", remedy="use --backend gloo --device cpu")
        torch.cuda.set_device(gpu_index(process))
    try:
        dist.init_process_group(
            options.backend,
            store=PrefixStore("group", store),
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=options.timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise EtloomError(
            f"the backend {options.backend!r} did not start: {str(error).splitlines()[0]}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


# Allocates the input and output tensors of a rank's communication calls before any call is timed.

_Slots = list[tuple[int, int]]
"""(buffer, elements) of each tensor of a call."""


def allocate_buffers(
    calls: Sequence[Call], waits: Sequence[tuple[int, ...]], rank: int, device: torch.device, backend: str
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the input and output tensors of each call; calls in flight at the same time share no buffer.

    Args:
        waits: For each call, the earlier calls that are waited for before it.

    Raises:
        EtloomError: The buffers do not fit into memory.
    """
    sizes, assignments = _assign_buffers(calls, waits, rank, backend)
    if device.type == "cpu":
        _check_memory(sizes)
    buffers = {
        dtype: [torch.ones(size, dtype=dtype, device=device) for size in dtype_sizes]
        for dtype, dtype_sizes in sizes.items()
    }
    for dtype, slots, input_count in assignments:
        tensors = [buffers[dtype][buffer][:elements] for buffer, elements in slots]
        yield tensors[:input_count], tensors[input_count:]


def _assign_buffers(
    calls: Sequence[Call], waits: Sequence[tuple[int, ...]], rank: int, backend: str
) -> tuple[dict[torch.dtype, list[int]], list[tuple[torch.dtype, _Slots, int]]]:
    """Assign a reusable buffer to each tensor; return buffer sizes (elements) by dtype, and each call's buffers."""
    sizes: dict[torch.dtype, list[int]] = {}
    free: dict[torch.dtype, list[int]] = {}
    assignments: list[tuple[torch.dtype, _Slots, int]] = []
    in_use: dict[int, list[tuple[torch.dtype, int]]] = {}
    for call, completed in zip(calls, waits, strict=True):
        for earlier in completed:
            for dtype, buffer in in_use.pop(earlier, []):
                free[dtype].append(buffer)
        dtype = torch_dtype(call.dtype, backend)
        inputs, outputs = tensor_element_counts(call, rank)
        free_buffers, dtype_sizes = free.setdefault(dtype, []), sizes.setdefault(dtype, [])
        slots = []
        for elements in (*inputs, *outputs):
            if free_buffers:
                buffer = free_buffers.pop()
                dtype_sizes[buffer] = max(elements, dtype_sizes[buffer])
            else:
                buffer = len(dtype_sizes)
                dtype_sizes.append(elements)
            slots.append((buffer, elements))
        in_use[call.index] = [(dtype, buffer) for buffer, _ in slots]
        assignments.append((dtype, slots, len(inputs)))
    return sizes, assignments


def _check_memory(sizes: Mapping[torch.dtype, Sequence[int]]) -> None:
    required = sum(dtype.itemsize * sum(dtype_sizes) for dtype, dtype_sizes in sizes.items())
    processes = ranks_on_host()
    available = available_memory() // processes
    if required > available:
        shared = f", shared by {processes} ranks" if processes > 1 else ""
        raise EtloomError(
            f"buffers of {required / 1e9:,.1f} GB do not fit into {available / 1e9:,.1f} GB of free memory{shared}",
            remedy="reduce the sizes (--scale 0.1) or the number of calls (--first)",
        )


# Measures when communication calls complete, and how long waiting for them blocks the host or the GPU stream.


class Clock:
    """Measures when communication calls complete: on a CPU by the host's clock, on a GPU by events on a stream.

    Attributes:
        blocked_ns: Time since `begin` that the host (on a GPU: the stream of the operators) was blocked in waits. On a
            GPU it is known only after `finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._side_stream: Any = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self.blocked_ns = 0
        self._completed: list[int] = []
        self._events: list[tuple[int, Any, Any]] = []

    def begin(self, count: int) -> None:
        """Reset all times before a pass of ``count`` calls."""
        self.blocked_ns = 0
        self._completed = [0] * count
        self._events = []
        if self._is_cuda:
            torch.cuda.synchronize()
            self._origin = _new_event()
            self._origin.record()
            self._origin_ns = time.monotonic_ns()

    def watch(self, index: int, work: Any) -> None:
        """On a CPU, record when a call completes, if the backend reports this (gloo: not for sends and receives)."""
        if self._is_cuda or work is None:
            return
        completed = self._completed

        def record(_: Any) -> None:
            completed[index] = time.monotonic_ns()

        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(record)

    def wait(self, index: int, work: Any) -> None:
        """Wait until a call completes; on a GPU the current stream waits instead of the host."""
        if self._is_cuda:
            self._wait_on_stream(index, work)
            return
        start = time.monotonic_ns()
        if work is not None:
            work.wait()
        now = time.monotonic_ns()
        self._completed[index] = self._completed[index] or now
        self.blocked_ns += now - start

    def _wait_on_stream(self, index: int, work: Any) -> None:
        operators = torch.cuda.current_stream()
        before = _new_event()
        before.record(operators)
        with torch.cuda.stream(self._side_stream):
            if work is not None:
                work.wait()
            end = _new_event()
            end.record()
        operators.wait_event(end)
        self._events.append((index, before, end))

    def finish(self) -> list[int]:
        """Return the completion time of each call in ns on the monotonic clock."""
        if self._is_cuda:
            torch.cuda.synchronize()
            for index, before, end in self._events:
                self._completed[index] = self._origin_ns + round(self._origin.elapsed_time(end) * 1e6)
                self.blocked_ns += max(0, round(before.elapsed_time(end) * 1e6))
        return self._completed


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
