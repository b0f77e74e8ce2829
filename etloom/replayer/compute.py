"""Computation replay: the recorded operators of a rank run again, in order, on this machine."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import polars as pl

from etloom import linker, readers
from etloom.errors import EtloomError
from etloom.trace import Trace

if TYPE_CHECKING:
    from etloom.replayer.machine import Machine
    from etloom.replayer.program import Program
    from etloom.replayer.steps import Step

Progress = Callable[["Step"], None]
DEVICES = ("cpu", "cuda", "meta")
COVERAGE = {
    "name": pl.String,
    "result": pl.String,
    "reason": pl.String,
    "count": pl.Int64,
    "share_of_count": pl.Float64,
    "recorded_ns": pl.Int64,
    "share_of_time": pl.Float64,
}
"""Columns of `Replayed.coverage`. result: replayed, substituted, skipped or communication. Shares are of all operators
but communication; times are of the host, inclusive, null where the recording has none."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """coverage: `COVERAGE`, most time or most calls first. recorded_ns: from the start of the first operator that is
    replayed to the end of the last, null where no times were recorded. repeats_ns: of each timed repeat. peak_bytes:
    the most that tensors held between operators, which take more while they run. trace: one more repeat, profiled and
    linked; on meta there is none. saved: how many tensors hold values that were saved beside the trace; not_used: why
    others that were saved do not, and how many."""

    coverage: pl.DataFrame
    recorded_ns: int | None
    repeats_ns: list[int]
    peak_bytes: int
    trace: Trace | None
    saved: int = 0
    not_used: Mapping[str, int] = field(default_factory=dict)

    def covered(self, by: str = "count") -> float | None:
        """The share that is replayed or substituted, by count or recorded_ns; None where that is not known."""
        computes = self.coverage.filter(pl.col("result") != "communication")
        whole = float(computes[by].sum())
        return 1 - float(computes.filter(pl.col("result") == "skipped")[by].sum()) / whole if whole else None


def replay(
    trace: Trace,
    device: str = "cpu",
    *,
    namespaces: frozenset[str] = frozenset({"aten"}),
    step: int | None = None,
    repeats: int = 3,
    warmup: int = 1,
    max_bytes: int | None = None,
    progress: Progress = lambda step: None,
    tried: Callable[[], None] = lambda: None,
    leave_out: Mapping[int, str] = MappingProxyType({}),
    resources: Path | None = None,
) -> Replayed:
    """Replay the operators of a linked trace, or of its step N, ``repeats`` times after ``warmup``.

    Only operators of ``namespaces`` are run, and none that opens files or trusts its sizes. max_bytes: what this
    process may take more on a CPU (default: its share of 60 % of what is free); an operator that wants more is skipped.
    progress: called with each step before it is tried. tried: called when all were. leave_out: node -> why its operator
    is not to be tried. resources: the folder with values that were saved beside the trace (`saved.folder_of`). Raises
    EtloomError where the trace has nothing to replay or the device is not there.
    """
    machine = _planned(trace, device, namespaces, step, resources, 0)
    profiled = None
    times = []
    with _bounded(device, max_bytes):
        machine.rehearse(progress, leave_out)
        tried()
        if device != "meta":
            for _ in range(warmup):
                machine.run()
            for _ in range(repeats):
                start = time.perf_counter_ns()
                machine.run()
                times.append(time.perf_counter_ns() - start)
            profiled = _profiled(machine, trace.rank)
    return Replayed(
        coverage(machine),
        _recorded_ns(trace, machine.program),
        times,
        machine.peak_bytes,
        profiled,
        machine.saved.used,
        machine.saved.refused,
    )


def prepared(
    trace: Trace,
    device: str = "cpu",
    *,
    namespaces: frozenset[str] = frozenset({"aten"}),
    step: int | None = None,
    max_bytes: int | None = None,
    progress: Progress = lambda step: None,
    leave_out: Mapping[int, str] = MappingProxyType({}),
    resources: Path | None = None,
    gpu: int = 0,
) -> Machine:
    """The operators of a linked trace, rehearsed on a device: of several GPUs on this one. Other arguments and errors
    as for `replay`."""
    machine = _planned(trace, device, namespaces, step, resources, gpu)
    with _bounded(device, max_bytes):
        machine.rehearse(progress, leave_out)
    return machine


def _planned(
    trace: Trace, device: str, namespaces: frozenset[str], step: int | None, resources: Path | None, gpu: int
) -> Machine:
    """The operators of a trace on a device, of which none was tried."""
    import torch

    from etloom.replayer.machine import Machine
    from etloom.replayer.program import program

    if device not in DEVICES:
        raise EtloomError(f"no device is called {device!r}", remedy=f"one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise EtloomError("this torch sees no GPU", remedy="--device cpu, or meta for shapes only")
    if device == "cuda":
        # Slurm may show each process of a host its own GPU alone.
        torch.cuda.set_device(gpu % torch.cuda.device_count())
    return Machine(program(trace, namespaces, step), torch.device(device), resources)


def _bounded(device: str, max_bytes: int | None) -> AbstractContextManager[None]:
    """What this process may take from now on: taken once, since a bound on top of a bound is none."""
    import torch

    from etloom.replayer.materials import bounded

    if device != "cpu":
        return contextlib.nullcontext()
    torch.ones(1 << 17).add(1)  # threads are started before memory for their stacks is bounded
    return bounded(max_bytes)


def _profiled(machine: Machine, rank: int | None) -> Trace:
    from torch.profiler import ProfilerActivity, profile, record_function

    wanted = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (machine.device.type == "cuda")
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        file = Path(folder) / "replay.json"
        with profile(activities=wanted, record_shapes=True) as profiler, record_function("ProfilerStep#0"):
            machine.run()
        profiler.export_chrome_trace(str(file))
        read = readers.read(file)
    assert isinstance(read, Trace)
    return linker.link(read.replace(meta={"rank": rank or 0, "path": None}))


def _recorded_ns(trace: Trace, todo: Program) -> int | None:
    ran = pl.DataFrame({"node": [step.node for step in todo.steps]}, schema={"node": pl.UInt32})
    timed = trace.links.join(ran, on="node", how="semi").join(
        trace.events.select("ts", "dur", event="id"), on="event"
    )
    span = timed.select((pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()).item()
    return span if isinstance(span, int) else None


def coverage(machine: Machine) -> pl.DataFrame:
    """What became of each recorded operator in the rehearsal: a row a name, result and reason (COVERAGE)."""
    todo = machine.program

    def rows() -> Iterator[tuple[str, str, str | None, int | None]]:
        for step, outcome in zip(todo.steps, machine.outcomes, strict=True):
            yield step.name, outcome.result, outcome.reason, step.recorded_ns
        for left in todo.left_out:
            result = "communication" if left.is_communication else "skipped"
            yield left.name, result, left.reason, left.recorded_ns

    names = ("name", "result", "reason", "recorded_ns")
    found = pl.DataFrame(list(rows()), schema={name: COVERAGE[name] for name in names}, orient="row")
    computes = pl.col("result") != "communication"
    known = pl.col("recorded_ns").count() > 0
    return (
        found.group_by("name", "result", "reason")
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.when(known).then(pl.col("recorded_ns").sum()))
        .with_columns(
            share_of_count=pl.when(computes).then(pl.col("count") / pl.col("count").filter(computes).sum()),
            share_of_time=pl.when(computes).then(
                pl.col("recorded_ns") / pl.col("recorded_ns").filter(computes).sum()
            ),
        )
        .select(*COVERAGE)
        .sort("recorded_ns", "count", "name", descending=[True, True, False], nulls_last=True)
    )
