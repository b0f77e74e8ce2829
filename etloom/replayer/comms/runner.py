"""Run a plan: the recorded calls on real processes, timed to their completion."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from etloom.core.errors import EtloomError
from etloom.core.text import format_ranks
from etloom.replayer.comms.backends import check_backend
from etloom.replayer.comms.buffers import allocate_buffers
from etloom.replayer.comms.clock import Clock
from etloom.replayer.comms.distributed_calls import (
    PreparedCall,
    expected_results,
    make_process_groups,
    start_messages,
    verification_value,
)
from etloom.replayer.comms.watchdog import Process
from etloom.replayer.plan import Call, RankPlan


@dataclass(frozen=True)
class CommsOptions:
    """timing: as fast as possible, or with the recorded gaps, spent (gap) spinning or multiplying matrices.
    blocking: every collective is waited for at once. batch: messages that were in flight together are made as one, by
    default on a GPU, where two ranks that each send first would wait for each other. repeats are timed after ``warmup``
    ones that are not."""

    backend: str = "gloo"
    device: str = "cpu"
    timing: str = "fast"
    gap: str = "spin"
    blocking: bool = False
    repeats: int = 5
    warmup: int = 1
    verify: bool = False
    timeout_s: float = 60.0
    batch: bool | None = None


@dataclass(frozen=True)
class CallTimes:
    """Of one rank, [repeat, call] in ns on its monotonic clock: made, returned, done. zero: when all set out.

    span, blocked: [repeat] in ns, of all calls from the first to the end of the last, and of it what the host waited.
    """

    made: np.ndarray
    returned: np.ndarray
    done: np.ndarray
    zero: int
    span: np.ndarray
    blocked: np.ndarray


class Runner:
    """The calls of one rank, with their groups and buffers ready. ``at`` says which call it is at.

    between: called with a node to do what the rank computed before that, and with None at the end. Among that a call is
    waited for where the plan says so (`Call.until`).
    """

    def __init__(
        self,
        part: RankPlan,
        place: Process,
        options: CommsOptions,
        between: Callable[[int | None], None] | None = None,
    ) -> None:
        self.options = options
        self.place = place
        self.calls: Sequence[Call] = part.calls
        self.at = 0
        self._between = between
        self._device = (
            torch.device(options.device, gpu_index(place))
            if options.device == "cuda"
            else torch.device(options.device)
        )
        groups = make_process_groups(part.groups, part.world, timedelta(seconds=options.timeout_s))
        self._after = _blocking_waits(self.calls) if options.blocking else [call.after for call in self.calls]
        self._until = {} if between is None else _waits_before_nodes(self.calls)
        # Those that are not waited for at once: their end is asked of the backend.
        self._flying = set(range(len(self.calls)))
        if between is None:
            at_once = {one for at, after in enumerate(self._after) for one in after if one == at - 1}
            self._flying -= {len(self.calls) - 1, *at_once}
        batch = options.device == "cuda" if options.batch is None else options.batch
        self._batches = _message_batches(self.calls, self._after) if batch else {}
        tensors = allocate_buffers(self.calls, self._after, place.rank, self._device, options.backend)
        self._ready = [
            PreparedCall(call, groups.get(call.group), *own)
            for call, own in zip(self.calls, tensors, strict=True)
        ]
        self._clock = Clock(self._device)
        self._busy = _make_busy_loop(self._device) if options.gap == "load" else None

    def where(self) -> str:
        """The call it is at, in words."""
        if self.at >= len(self.calls):
            return "the end of a repeat"
        call = self.calls[self.at]
        whom = f"rank {call.peer}" if call.peer is not None else format_ranks(call.group)
        return f"call {call.index} ({call.collective}, {call.bytes:,} B, with {whom})"

    def run(self) -> CallTimes:
        """All repeats. Raises EtloomError for a result that is wrong (verify), RuntimeError as torch does."""
        if self.options.verify:
            self._pass(self._check)
        for _ in range(self.options.warmup):
            self._pass(None)
        times = []
        spans = []
        zero = 0
        for repeat in range(self.options.repeats):
            dist.barrier()
            begin = time.monotonic_ns()
            zero = zero if repeat else begin
            times.append(self._pass(None))
            spans.append((time.monotonic_ns() - begin, self._clock.blocked_ns))
        made, returned, done = (np.array([one[at] for one in times], dtype=np.int64) for at in range(3))
        span, blocked = np.array(spans, dtype=np.int64).T
        return CallTimes(made, returned, done, zero, span, blocked)

    def _pass(self, check: Callable[[PreparedCall], None] | None) -> tuple[list[int], list[int], list[int]]:
        count = len(self.calls)
        made, returned = [0] * count, [0] * count
        waiting: dict[int, Any] = {}
        clock = self._clock
        clock.begin(count)
        paced = self.options.timing == "recorded" and check is None
        target = time.monotonic_ns()
        for at, (ready, after) in enumerate(zip(self._ready, self._after, strict=True)):
            self._beside(at, waiting, check)
            for one in after:
                self._settle(one, waiting, check)
            self.at = at
            if paced:
                target += ready.call.gap_ns or 0
                self._pause(target)
            if at in waiting:  # made with the messages before it
                continue
            together = self._batches.get(at, range(at, at + 1))
            for one in together:
                if check:
                    for tensor in self._ready[one].tensors:
                        tensor.fill_(verification_value(self.place.rank, tensor.dtype, self.place.world))
            for one in together:
                made[one] = time.monotonic_ns()
            works = (
                [ready.start()]
                if len(together) == 1
                else start_messages([self._ready[one] for one in together])
            )
            for one, work in zip(together, works, strict=True):
                waiting[one] = work
                returned[one] = time.monotonic_ns()
                if one in self._flying:
                    clock.watch(one, work)
        self._beside(count, waiting, check)
        for one in list(waiting):
            self._settle(one, waiting, check)
        self.at = count
        return made, returned, clock.finished()

    def _beside(self, at: int, waiting: dict[int, Any], check: Callable[[PreparedCall], None] | None) -> None:
        """What the rank computed before a call, or to the end, with the calls that it waited for in between."""
        self.at = min(at, len(self.calls) - 1)
        if self._between is None:
            return
        for node, one in self._until.get(at, ()):
            self._between(node)
            self._settle(one, waiting, check)
        self._between(None if at == len(self.calls) else self.calls[at].node or 0)

    def _settle(
        self, one: int, waiting: dict[int, Any], check: Callable[[PreparedCall], None] | None
    ) -> None:
        """Wait for a call, if nobody has."""
        if one not in waiting:
            return
        self.at = one
        self._clock.wait(one, waiting.pop(one))
        if check:
            check(self._ready[one])

    def _pause(self, until: int) -> None:
        while time.monotonic_ns() < until:
            if self._busy is not None:
                self._busy()

    def _check(self, ready: PreparedCall) -> None:
        for tensor, right in expected_results(ready, self.place.rank, self.place.world):
            same = tensor == right
            if ready.reduce_op == "avg" and tensor.is_floating_point():
                # Each summand may be divided before: a rounding each.
                near = 4 * torch.finfo(tensor.dtype).eps
                same |= (tensor.float() - right.float()).abs() <= near * right.float().abs()
            if wrong := int(same.logical_not().sum()):
                raise EtloomError(f"{self.where()} gave {wrong:,} wrong elements of {tensor.numel():,}")


def _blocking_waits(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    """Waits of a blocking replay: for each collective at once, for messages as recorded, since two ranks that send to
    each other both wait."""
    found = []
    for call in calls:
        before = {call.index - 1} if call.index and calls[call.index - 1].peer is None else set()
        found.append(tuple(sorted(before.union(call.after))))
    return found


def _waits_before_nodes(calls: Sequence[Call]) -> dict[int, list[tuple[int, int]]]:
    """Call, or their number for the end -> (node, call) of those that are waited for among the operators before it, in
    the order of these."""
    found: dict[int, list[tuple[int, int]]] = {}
    nodes = [call.node or 0 for call in calls]
    for call in calls:
        if call.until is not None:
            found.setdefault(bisect_left(nodes, call.until), []).append((call.until, call.index))
    return {at: sorted(waits) for at, waits in found.items()}


def _message_batches(calls: Sequence[Call], after: Sequence[tuple[int, ...]]) -> dict[int, range]:
    """First call -> the messages in a row that need not wait for each other nor for what ends in between."""
    found: dict[int, range] = {}
    first = 0
    for at, call in enumerate(calls):
        if call.peer is None or calls[first].peer is None or after[at]:
            first = at
        elif at > first:
            found[first] = range(first, at + 1)
    return found


def _make_busy_loop(device: torch.device) -> Callable[[], None]:
    """Something like computation, some 10 us a call on a host core."""
    left = torch.randn(64, 64, device=device)

    def multiply() -> None:
        torch.mm(left, left)

    return multiply


def gpu_index(place: Process) -> int:
    """The GPU of a process among those that it sees: Slurm may show each process of a host its own one alone."""
    return place.local % torch.cuda.device_count()


def torch_thread_count() -> int:
    """On a CPU."""
    return torch.get_num_threads()


def resolve_backend_and_device(backend: str | None, device: str | None) -> tuple[str, str]:
    """Backend and device. One that is not given follows from the other; neither, from whether there is a GPU."""
    if device is None:
        gpu = torch.cuda.is_available() if backend is None else backend in ("nccl", "ucc")
        device = "cuda" if gpu else "cpu"
    return backend or ("nccl" if device == "cuda" else "gloo"), device


@contextmanager
def process_group(place: Process, store: Any, options: CommsOptions) -> Iterator[None]:
    """torch's default process group over a store. Raises EtloomError for a backend that this torch does not have."""
    check_backend(options.backend)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise EtloomError("this torch sees no GPU", remedy="--backend gloo --device cpu")
        torch.cuda.set_device(gpu_index(place))
    try:
        dist.init_process_group(
            options.backend,
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world,
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
