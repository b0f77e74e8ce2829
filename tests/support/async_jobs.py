"""Random jobs whose ranks issue collectives ahead of their waits: traces of which it is known what waits for what.

The ranks of a job run one program, each at its own pace. A collective ends on all ranks once all have issued it and the
data is transferred; ranks go on meanwhile. Its wait leaves evidence of one kind (`EVIDENCE`), and often takes no time.
`simulate` runs a program, at any speed of the network.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import polars as pl

import etloom
from etloom.core.trace import Job, Trace

EVIDENCE = ("operator", "reducer", "optimizer", "tensor", "step")
"""What shows that a collective is waited for: a wait operator, DDP's reducer, the optimizer, the next operator that
uses the tensor (stated by an execution trace), or nothing but the end of the step."""
CALL_NS = 20_000
WAIT_NS = 1_000
"""A wait operator takes as long itself, which cannot be seen if it had to wait."""


@dataclass(frozen=True)
class Instruction:
    """``kind``: compute, issue, wait or step. ``work``: number of a collective. ``sizes``: ns, per rank or of it."""

    kind: str
    work: int = -1
    sizes: tuple[int, ...] = ()
    evidence: str = ""


@dataclass
class Outcome:
    """A simulated job: its trace, per rank and work the end of the collective and the first time after its wait, and
    the end of each step."""

    job: Job
    ends: list[dict[int, int]]
    resumed: list[dict[int, int]]
    step_ends: list[list[int]]

    @property
    def makespan(self) -> int:
        return max(ends[-1] for ends in self.step_ends)


def make_program(seed: int, ranks: int = 2) -> list[Instruction]:
    """A program of one to three steps, in each of which every collective is waited for."""
    dice = random.Random(seed)
    program: list[Instruction] = []
    work = 0
    for _ in range(dice.randint(1, 3)):
        program.append(Instruction("step"))
        pending: list[Instruction] = []
        for _ in range(dice.randint(3, 12)):
            kind = dice.choice(["compute", "compute", "issue", "wait"])
            if kind == "compute":
                sizes = tuple(dice.randint(60_000, 900_000) for _ in range(ranks))
                program.append(Instruction("compute", sizes=sizes))
            elif kind == "issue":
                program.append(Instruction("issue", work, (dice.randint(100_000, 800_000),)))
                pending.append(Instruction("wait", work, evidence=dice.choice(EVIDENCE[:2] + EVIDENCE[3:4])))
                work += 1
            elif pending:
                program.append(pending.pop(0))
        # The optimizer needs all reductions, the end of a step everything.
        last = dice.choice(["optimizer", "step"])
        program += [Instruction("wait", wait.work, evidence=last) for wait in pending]
    return [*program, Instruction("step")]


def simulate(program: list[Instruction], ranks: int = 2, network: float = 1.0) -> Outcome:
    """Run a program whose transfers take ``network`` times as long."""
    now = [1_000_000] * ranks
    rows: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    comms: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    tensors: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    ends: dict[int, int] = {}
    resumed: list[dict[int, int]] = [{} for _ in range(ranks)]
    step_ends: list[list[int]] = [[] for _ in range(ranks)]
    step_starts: list[int | None] = [None] * ranks

    def emit(rank: int, name: str, dur: int, cat: str = "cpu_op", tensor: int | None = None) -> None:
        number = len(rows[rank])
        rows[rank].append(_event(number, cat, name, now[rank], dur))
        if tensor is not None:
            tensors[rank].append({"node": number, "io": 0, "index": 0, "storage_id": tensor + 1})
        now[rank] += dur

    for instruction in program:
        kind, work = instruction.kind, instruction.work
        if kind == "issue":
            end = max(now) + int(instruction.sizes[0] * network)
            ends[work] = end
        for rank in range(ranks):
            if kind == "step":
                if (start := step_starts[rank]) is not None:
                    name = f"ProfilerStep#{len(step_ends[rank])}"
                    rows[rank].append(
                        _event(len(rows[rank]), "user_annotation", name, start, now[rank] - start)
                    )
                    step_ends[rank].append(now[rank])
                now[rank] += 5_000
                step_starts[rank] = now[rank]
                now[rank] += 5_000
            elif kind == "compute":
                emit(rank, "aten::mm", instruction.sizes[rank])
            elif kind == "issue":
                issued = now[rank]
                number = len(rows[rank])
                emit(rank, "c10d::allreduce_", CALL_NS, tensor=work)
                rows[rank].append(
                    _event(
                        number + 1,
                        "user_annotation",
                        "gloo:all_reduce",
                        issued + 10_000,
                        ends[work] - issued - 10_000,
                    )
                )
                comms[rank].append(
                    {"event": number, "collective": "all_reduce", "pg_name": "0", "seq": work, "group_size": ranks,
                     "ranks": str(list(range(ranks))), "dtype": "Float", "in_nelems": 1000, "out_nelems": 1000}
                )  # fmt: skip
            elif kind == "wait":
                if instruction.evidence == "operator":
                    dur = max(WAIT_NS, ends[work] - now[rank])
                    emit(rank, "_c10d_functional::wait_tensor", dur)
                resumed[rank][work] = now[rank] = max(now[rank], ends[work])
                if instruction.evidence == "reducer":
                    emit(rank, "torch.distributed.ddp.reducer::copy_bucket_to_grad", 15_000)
                elif instruction.evidence == "optimizer":
                    emit(rank, "Optimizer.step#SGD.step", 15_000, "user_annotation")
                elif instruction.evidence == "tensor":
                    emit(rank, "aten::mul_", 15_000, tensor=work)
    traces = {rank: _link(rows[rank], comms[rank], tensors[rank], rank) for rank in range(ranks)}
    return Outcome(Job(traces), [ends] * ranks, resumed, step_ends)


def _event(number: int, cat: str, name: str, ts: int, dur: int) -> dict[str, Any]:
    return {"rf_id": number + 1, "number": number, "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1,
            "tid": 1, "ph": "X"}  # fmt: skip


def _link(
    rows: list[dict[str, Any]], comms: list[dict[str, Any]], tensors: list[dict[str, Any]], rank: int
) -> Trace:
    order = sorted(rows, key=lambda row: (row["ts"], -row["dur"]))
    place = {row["number"]: n for n, row in enumerate(order)}
    events = pl.DataFrame(
        [
            {"id": n, "position": n, **{k: v for k, v in row.items() if k != "number"}}
            for n, row in enumerate(order)
        ]
    )
    tables = {
        "events": events,
        "comms": pl.DataFrame(
            [{"id": n, **row, "event": place[row["event"]]} for n, row in enumerate(comms)]
        ),
        "nodes": events.select(
            "id",
            et_id=pl.col("id").cast(pl.Int64) + 2,
            name="name",
            rf_id="rf_id",
            tid=pl.lit(1),
            scope=pl.lit(0),
        ),
        "tensors": pl.DataFrame([{**row, "node": place[row["node"]]} for row in tensors]),
    }
    return etloom.link(Trace({name: table for name, table in tables.items() if table.height}, {"rank": rank}))
