"""Pipeline schedules (GPipe, 1F1B, interleaved): the order of forward and backward operations on each stage.

Stage k of p holds v model chunks; chunk c of stage k is virtual stage c * p + k, and a micro-batch passes the virtual
stages in order. See Huang et al., "GPipe" (2019), and Narayanan et al., "Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM" (SC 2021) for 1F1B and its interleaved variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etloom.core.errors import EtloomError

FORWARD, BACKWARD = "forward", "backward"


class Operation(NamedTuple):
    """The forward or backward operation of a virtual stage for a micro-batch."""

    direction: str
    virtual_stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: ``kind`` is gpipe or 1f1b (interleaved if there are several model chunks per stage)."""

    kind: str
    stages: int
    micro_batches: int
    chunks: int = 1

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages: stages times model chunks per stage."""
        return self.stages * self.chunks

    def describe(self) -> str:
        """Return the schedule as text: name, number of stages, micro-batches and chunks."""
        name = {"gpipe": "GPipe"}.get(self.kind, "interleaved 1F1B" if self.chunks > 1 else "1F1B")
        chunks = f", {self.chunks} model chunks per stage" if self.chunks > 1 else ""
        return f"{name}, {self.stages} stages, {self.micro_batches} micro-batches{chunks}"

    def list_operations(self, stage: int) -> list[Operation]:
        """Return the operations of a stage in execution order. Raises EtloomError if the schedule is impossible."""
        total = self.micro_batches * self.chunks
        if self.kind == "gpipe":
            warmup = total
        elif self.chunks == 1:
            warmup = min(self.stages - stage - 1, total)
        else:
            self._check_interleaved()
            # As Megatron-LM: with one group of micro-batches, all forward operations come first.
            all_first = self.micro_batches == self.stages
            ahead = 2 * (self.stages - stage - 1) + (self.chunks - 1) * self.stages
            warmup = total if all_first else min(ahead, total)
        directions = [FORWARD] * warmup
        directions += [FORWARD, BACKWARD] * (total - warmup) + [BACKWARD] * warmup
        count = {FORWARD: 0, BACKWARD: 0}
        operations = []
        for direction in directions:
            operations.append(self._place(direction, count[direction], stage))
            count[direction] += 1
        return operations

    def _place(self, direction: str, number: int, stage: int) -> Operation:
        """Return the operation that a stage executes as number ``number`` of its forward or backward operations."""
        if self.chunks == 1:
            return Operation(direction, stage, number)
        round_, place = divmod(number, self.stages * self.chunks)
        chunk, micro_batch = divmod(place, self.stages)
        if direction == BACKWARD:
            chunk = self.chunks - 1 - chunk
        return Operation(direction, chunk * self.stages + stage, round_ * self.stages + micro_batch)

    def _check_interleaved(self) -> None:
        if self.micro_batches % self.stages or self.stages < 2:
            raise EtloomError(
                f"no interleaved schedule of {self.micro_batches} micro-batches on {self.stages} stages",
                remedy="the number of micro-batches must be a multiple of the number of stages, of at least 2",
            )


def recognize_schedule(directions: Sequence[Sequence[str]], chunks: int) -> Schedule | None:
    """Return the schedule whose order of forward and backward operations all stages follow; None if there is none.

    Args:
        directions: of the operations of each stage, in order.
        chunks: model chunks per stage.
    """
    micro_batches = list(directions[0]).count(FORWARD) // chunks
    for kind in ("1f1b", "gpipe") if chunks == 1 else ("1f1b",):
        schedule = Schedule(kind, len(directions), micro_batches, chunks)
        try:
            orders = [
                [operation.direction for operation in schedule.list_operations(stage)]
                for stage in range(schedule.stages)
            ]
        except EtloomError:
            return None
        if orders == [list(stage) for stage in directions]:
            return schedule
    return None
