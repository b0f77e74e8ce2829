"""Jobs with a pipeline of which every time is known: traces of each rank, and the times of its operations.

A stage takes ``LAYER`` for each of its layers, forward; backward twice as long. The first stage also has an embedding,
the last a head. A rank posts the receive of an operation as soon as it is free, a message leaves ``SEND`` after its
operation and takes ``MESSAGE``, an operation starts ``GAP`` after both. ``OPTIMIZER`` of each layer ends a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import polars as pl

from etloom import linker
from etloom.core.trace import Job, Trace

LAYER, EMBEDDING, HEAD = 16_000, 5_000, 9_000
SEND, MESSAGE, GAP = 700, 3_000, 1_100
LAYERS = 16
OPTIMIZER = 2_000
Op = tuple[str, int, int]
"""forward | backward, virtual stage, micro-batch."""


def order_greedily(stage: int, stages: int, micro_batches: int, limit: int | None = None) -> list[Op]:
    """A stage runs backward when it holds ``limit`` micro-batches (1F1B: one for each stage from it on)."""
    limit = stages - stage if limit is None else limit
    order: list[Op] = []
    forward = backward = 0
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < limit:
            order.append(("forward", stage, forward))
            forward += 1
        else:
            order.append(("backward", stage, backward))
            backward += 1
    return order


@dataclass(frozen=True)
class PipelineJob:
    """A job: ``orders`` by stage, ``chunks`` a stage, ``steps``, ``elements`` (fp32) of a message if recorded."""

    orders: tuple[tuple[Op, ...], ...]
    chunks: int = 1
    steps: int = 2
    elements: int | None = None

    @property
    def virtual_stages(self) -> int:
        return len(self.orders) * self.chunks

    def duration(self, op: Op) -> int:
        direction, place, _ = op
        time = LAYER * LAYERS // self.virtual_stages
        time += EMBEDDING * (place == 0) + HEAD * (place == self.virtual_stages - 1)
        return time * (1 if direction == "forward" else 2)

    @property
    def optimizer(self) -> int:
        return OPTIMIZER * LAYERS // len(self.orders)

    def source(self, op: Op) -> Op | None:
        direction, place, micro_batch = op
        before = place + (-1 if direction == "forward" else 1)
        return (direction, before, micro_batch) if 0 <= before < self.virtual_stages else None

    def times(self) -> dict[tuple[int, int, Op], tuple[int, int]]:
        """(stage, step, operation) -> start, end."""
        stages = len(self.orders)

        @cache
        def start(stage: int, step: int, index: int) -> int:
            free = end(stage, step, index - 1) if index else begin(stage, step)
            source = self.source(self.orders[stage][index])
            if source is None:
                return free + GAP
            other = source[1] % stages
            sent = end(other, step, self.orders[other].index(source)) + SEND
            return max(free, max(sent, free) + MESSAGE) + GAP

        def begin(stage: int, step: int) -> int:
            return end(stage, step - 1, len(self.orders[stage]) - 1) + self.optimizer if step else 0

        def end(stage: int, step: int, index: int) -> int:
            return start(stage, step, index) + self.duration(self.orders[stage][index])

        return {
            (stage, step, op): (start(stage, step, i), end(stage, step, i))
            for step in range(self.steps)
            for stage, order in enumerate(self.orders)
            for i, op in enumerate(order)
        }

    def job(self, on_device: bool = False) -> Job:
        return Job({stage: self._trace(stage, on_device) for stage in range(len(self.orders))})

    def _trace(self, stage: int, on_device: bool) -> Trace:
        times, stages = self.times(), len(self.orders)
        events: list[dict[str, Any]] = []
        comms: list[dict[str, Any]] = []

        def emit(cat: str, name: str, begin: int, finish: int, **more: Any) -> None:
            track = (
                {"pid": 0, "tid": more["stream"], "device": 0} if "stream" in more else {"pid": 1, "tid": 1}
            )
            events.append(
                {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": finish - begin} | track | more
            )

        def message(kind: str, peer: int, begin: int, finish: int, step: int) -> None:
            name = "ncclDevKernel_SendRecv" if on_device else f"gloo:{kind}"
            where = {"stream": 20 + (kind == "send")} if on_device else {"tid": 5 + (kind == "send")}
            if on_device:
                where["correlation"] = 10**9 + len(events)
                emit(
                    "cuda_runtime",
                    "cudaLaunchKernel",
                    begin,
                    begin,
                    step=step,
                    correlation=10**9 + len(events),
                )
            emit("kernel" if on_device else "user_annotation", name, begin, finish, step=step, **where)
            comms.append({"of": events[-1], "collective": kind, "peer": peer})

        for step in range(self.steps):
            free = times[stage, step - 1, self.orders[stage][-1]][1] + self.optimizer if step else 0
            first = free
            for op in self.orders[stage]:
                begin, finish = times[stage, step, op]
                source = self.source(op)
                if source is not None:
                    message("recv", source[1] % stages, free, begin - GAP, step)
                self._compute(emit, op[0], begin, finish, step, on_device)
                for follower in ((op[0], op[1] + 1, op[2]), (op[0], op[1] - 1, op[2])):
                    if 0 <= follower[1] < self.virtual_stages and self.source(follower) == op:
                        arrived = times[follower[1] % stages, step, follower][0] - GAP
                        message("send", follower[1] % stages, finish + SEND, arrived, step)
                free = finish
            last = times[stage, step, self.orders[stage][-1]][1]
            emit("cpu_op", "aten::add_", last, last + self.optimizer, step=step)
            emit("user_annotation", f"ProfilerStep#{step}", first, last + self.optimizer, step=step)
        return self._link(events, comms, stage)

    def _compute(
        self, emit: Any, direction: str, begin: int, finish: int, step: int, on_device: bool
    ) -> None:
        name = "aten::mm" if direction == "forward" else "autograd::engine::evaluate_function: MmBackward0"
        if not on_device:
            emit("cpu_op", name, begin, finish, step=step)
            return
        emit("cpu_op", name, begin - 900, begin - 300, step=step)
        call = {"correlation": begin, "step": step}
        emit("cuda_runtime", "cudaLaunchKernel", begin - 800, begin - 400, **call)
        emit("kernel", "gemm", begin, finish, stream=7, **call)

    def _link(self, events: list[dict[str, Any]], comms: list[dict[str, Any]], stage: int) -> Trace:
        ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
        number = {id(event): place for place, event in enumerate(ordered)}
        rows = [{"id": place, "position": place, **event} for place, event in enumerate(ordered)]
        stages = len(self.orders)
        group = {"pg_name": "pp", "pg_desc": "pipeline", "ranks": str(list(range(stages)))}
        messages = [
            {
                "id": place,
                "event": number[id(row["of"])],
                "collective": row["collective"],
                "peer": row["peer"],
            }
            | group
            | {"group_size": stages, "is_p2p": True, "in_nelems": self.elements, "dtype": "Float"}
            for place, row in enumerate(comms)
        ]
        tables = {
            "events": pl.DataFrame(rows, infer_schema_length=None),
            "comms": pl.DataFrame(messages),
            "groups": pl.DataFrame([{**group, "size": stages}]),
        }
        return linker.link(Trace(tables, {"rank": stage, "clock": "relative", "world_size": stages}))


def one_f_one_b(stages: int, micro_batches: int) -> PipelineJob:
    """A job with 1F1B."""
    return PipelineJob(tuple(tuple(order_greedily(k, stages, micro_batches)) for k in range(stages)))


def gpipe(stages: int, micro_batches: int) -> PipelineJob:
    """A job in which all forward operations come first."""
    return PipelineJob(
        tuple(tuple(order_greedily(k, stages, micro_batches, micro_batches)) for k in range(stages))
    )
