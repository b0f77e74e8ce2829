"""Computes start and end of each pipeline operation from schedule, durations, messages, and the end of each step.

An operation starts ``gap_ns`` after the previous one of its rank has ended and its message has arrived. A message
begins ``send_lag_ns`` after the operation that it comes from, not before the receiver is ready (``receive_lag_ns``
after its previous operation; None: it waits from the beginning) and not before the message ahead of it has arrived; it
takes ``transfer_ns``. The rest of a step follows the last operations of the ranks that communicate in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etloom.core.errors import AnalysisError
from etloom.simulator.pipelines.schedules import FORWARD, Operation


class Message(NamedTuple):
    """The message that an operation waits for; times in ns, ``size`` in bytes if it was recorded."""

    send_lag_ns: float
    receive_lag_ns: float | None
    transfer_ns: float
    size: int | None = None


class Work(NamedTuple):
    """Duration of an operation, gap before it (both in ns), and the message that it waits for, if any."""

    duration_ns: float
    gap_ns: float
    message: Message | None


class Rest(NamedTuple):
    """The end of a step on a rank: duration (ns) from the last operation of all ``ranks`` to the step's end."""

    duration_ns: float
    ranks: frozenset[int]


@dataclass(frozen=True)
class Pipelines:
    """Pipelines that run the same schedule: ranks, order of operations, durations and dependencies.

    Attributes:
        ranks: of each pipeline, by stage.
        begin_ns: of each rank.
        orders: operations of a step, by stage.
        virtual_stages: the number of virtual stages.
        steps: numbers of the steps.
        work: (rank, step, operation) -> its times.
        rests: (rank, step) -> the rest of the step.
    """

    ranks: Sequence[Sequence[int]]
    begin_ns: Mapping[int, float]
    orders: Sequence[Sequence[Operation]]
    virtual_stages: int
    steps: Sequence[int]
    work: Mapping[tuple[int, int, Operation], Work]
    rests: Mapping[tuple[int, int], Rest]


class Span(NamedTuple):
    """Start and end of an operation; ``sent``, ``arrived``: begin and end of the transfer of the message that it waits
    for, if any; in ns."""

    start: float
    end: float
    sent: float | None = None
    arrived: float | None = None


@dataclass(frozen=True)
class Timeline:
    """Times of pipelines (ns): ``spans`` of operations by (rank, step, operation), ``step_ends`` by (rank, step)."""

    spans: dict[tuple[int, int, Operation], Span]
    step_ends: dict[tuple[int, int], float]


def compute_timeline(pipelines: Pipelines) -> Timeline:
    """Compute start and end (ns) of all operations and steps of the pipelines.

    Raises:
        AnalysisError: operations wait for each other in a cycle.
    """
    return _Layout(pipelines).run()


class _Layout:
    """Computes the times of pipeline operations, each as soon as the times that it depends on are known."""

    def __init__(self, pipelines: Pipelines) -> None:
        self.pipelines = pipelines
        self.spans: dict[tuple[int, int, Operation], Span] = {}
        self.step_ends: dict[tuple[int, int], float] = {}
        self.last_ends: dict[tuple[int, int], float] = {}
        self.free = dict(pipelines.begin_ns)
        self.link_free: dict[tuple[int, str], float] = {}
        self.column = {rank: column for column, ranks in enumerate(pipelines.ranks) for rank in ranks}
        self.queues = {
            rank: [(step, operation) for step in pipelines.steps for operation in [*order, None]]
            for ranks in pipelines.ranks
            for rank, order in zip(ranks, pipelines.orders, strict=True)
        }
        self.place = dict.fromkeys(self.queues, 0)

    def run(self) -> Timeline:
        moved = True
        while moved:
            moved = False
            for rank, queue in self.queues.items():
                while self.place[rank] < len(queue) and self._advance(rank, *queue[self.place[rank]]):
                    self.place[rank] += 1
                    moved = True
        if any(self.place[rank] < len(queue) for rank, queue in self.queues.items()):
            raise AnalysisError("operations of the pipeline wait for each other in a cycle")
        return Timeline(self.spans, self.step_ends)

    def _advance(self, rank: int, step: int, operation: Operation | None) -> bool:
        """Compute the times of an operation or, for None, the end of a step; False if a dependency is not known yet."""
        if operation is None:
            return self._end_step(rank, step)
        work = self.pipelines.work[rank, step, operation]
        ready = self.free[rank]
        sent = arrived = None
        if work.message is not None:
            source = self._find_source(rank, step, operation)
            if source is None:
                return False
            sent = max(
                source + work.message.send_lag_ns, self.link_free.get((rank, operation.direction), source)
            )
            if work.message.receive_lag_ns is not None:
                sent = max(sent, ready + work.message.receive_lag_ns)
            arrived = sent + work.message.transfer_ns
            self.link_free[rank, operation.direction] = arrived
            ready = max(ready, arrived)
        start = ready + work.gap_ns
        self.spans[rank, step, operation] = Span(start, start + work.duration_ns, sent, arrived)
        self.free[rank] = self.last_ends[rank, step] = start + work.duration_ns
        return True

    def _find_source(self, rank: int, step: int, operation: Operation) -> float | None:
        """Return the end (ns) of the operation that sends the message to ``operation``; None if not known yet."""
        towards = -1 if operation.direction == FORWARD else 1
        before = operation._replace(virtual_stage=operation.virtual_stage + towards)
        ranks = self.pipelines.ranks[self.column[rank]]
        span = self.spans.get((ranks[before.virtual_stage % len(ranks)], step, before))
        return None if span is None else span.end

    def _end_step(self, rank: int, step: int) -> bool:
        rest = self.pipelines.rests[rank, step]
        for member in rest.ranks:
            queue, place = self.queues[member], self.place[member]
            if place < len(queue) and (
                queue[place][0] < step or (queue[place][0] == step and queue[place][1])
            ):
                return False
        self.free[rank] = max(self.last_ends[member, step] for member in rest.ranks) + rest.duration_ns
        self.step_ends[rank, step] = self.free[rank]
        return True
