"""Computation replay: the recorded operators of a rank run again, in order, on this machine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import polars as pl

from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Trace
from etloom.replayer.compute import memory_limits
from etloom.replayer.compute.progress import INTERRUPTED, NOT_TRIED, OUT_OF_TIME, TrialProgress

if TYPE_CHECKING:
    from etloom.replayer.compute.executor import Executor
    from etloom.replayer.compute.program import Program
    from etloom.replayer.compute.program_steps import ProgramStep

OnStep = Callable[["ProgramStep"], None]
Note = Callable[[str], None]
DEVICES = ("cpu", "cuda", "meta")
SLOW_PASS_S = 5.0
"""What takes longer is told of."""
_WARMING, _TIMED, _TRACED = "warming", "timed", "traced"
COVERAGE_COLUMNS = {
    "name": pl.String,
    "result": pl.String,
    "reason": pl.String,
    "count": pl.Int64,
    "share_of_count_pct": pl.Float64,
    "recorded_ns": pl.Int64,
    "share_of_time_pct": pl.Float64,
}
"""Columns of `Replayed.coverage`. result: replayed, substituted, skipped or communication. Shares are of all operators
but communication, in %; times are of the host, inclusive, null where the recording has none."""


@dataclass(frozen=True, eq=False)
class ComputeReplay:
    """coverage: `COVERAGE`, most time or most calls first. recorded_ns: from the start of the first operator that is
    replayed to the end of the last, null where no times were recorded. repeats_ns: of each timed repeat. peak_bytes:
    the most that tensors held between operators, which take more while they run. trace: one more pass, profiled and
    linked, or where it did not come to that what was rehearsed; null on meta and where none was asked for. saved: how
    many tensors hold values that were saved beside the trace; not_used: why others that were saved do not, and how
    many. stopped: why the replay ended before its end, which is then a row of the trace's stats; failed: an operator
    that had run failed."""

    coverage: pl.DataFrame
    recorded_ns: int | None
    repeats_ns: list[int]
    peak_bytes: int
    trace: Trace | None
    saved: int = 0
    not_used: Mapping[str, int] = field(default_factory=dict)
    stopped: str | None = None
    failed: bool = False

    def covered(self, by: str = "count") -> float | None:
        """The share that is replayed or substituted, by count or recorded_ns; None where that is not known."""
        computes = self.coverage.filter(pl.col("result") != "communication")
        whole = float(computes[by].sum())
        return 1 - float(computes.filter(pl.col("result") == "skipped")[by].sum()) / whole if whole else None


def replay_operators(
    trace: Trace,
    device: str = "cpu",
    *,
    namespaces: frozenset[str] = frozenset({"aten"}),
    step: int | None = None,
    repeats: int = 3,
    warmup: int = 1,
    max_bytes: int | None = None,
    until: float | None = None,
    progress: OnStep = lambda step: None,
    note: Note = lambda line: None,
    tried: Callable[[], None] = lambda: None,
    leave_out: Mapping[int, str] = MappingProxyType({}),
    resources: Path | None = None,
    threads: int | None = None,
    traced: bool = True,
) -> ComputeReplay:
    """Replay the operators of a linked trace, or of its step N, ``repeats`` times after ``warmup``.

    Only operators of ``namespaces`` are run, and none that opens files or trusts its sizes. max_bytes: what it may
    take (default: `memory.allowed`); operators that do not fit are skipped. until: by time.monotonic(), when no
    operator is tried any more and no repeat begun that would take longer. progress: called with each step before it is
    tried. note: called with lines for who waits. tried: called when all were. leave_out: node -> why its operator is
    not to be tried. resources: the folder with what was saved beside the trace (`saved.folder_of`). threads: of an
    operator on a CPU, for the rest of the process (default: as torch has them). traced: a trace of the replay is
    wanted, which takes one more pass. Who interrupts it (KeyboardInterrupt) gets what there is. Raises EtloomError
    where the trace has nothing to replay or the device is not there.
    """
    from etloom.replayer.compute.replay_trace import profile_pass, trial_run_trace

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    machine = _create_executor(trace, device, namespaces, step, resources, 0)
    times: list[int] = []
    made = None
    failed = False
    with _trial_run(machine, max_bytes, until, progress, note, leave_out):
        stopped = machine.stopped
        try:
            tried()
            count = warmup + repeats + traced if device != "meta" and not stopped else 0
            expected = sum(one.took_ns for one in machine.outcomes)
            if count * expected > 1e9 * SLOW_PASS_S:
                note(
                    f"all were tried; {repeats} repeats to come, of about {expected / 1e9:,.1f} s each"
                    + (f", after {warmup} to warm up" if warmup else "")
                    + (", and one more pass for the trace" if traced else "")
                )
            for what, name in _plan_passes(warmup, repeats, traced) if count else ():
                if until is not None and time.monotonic() + expected / 1e9 > until:
                    stopped = OUT_OF_TIME
                    break
                start = time.perf_counter_ns()
                if what == _TRACED:
                    made = profile_pass(machine, trace)
                else:
                    machine.run()
                expected = time.perf_counter_ns() - start
                times += [expected] * (what == _TIMED)
                if expected > 1e9 * SLOW_PASS_S:
                    note(f"{name} took {expected / 1e9:,.1f} s")
        except KeyboardInterrupt:
            stopped = INTERRUPTED
        except EtloomError as error:
            stopped, failed = str(error), True
    if traced and made is None and device != "meta":
        made = trial_run_trace(machine, trace)
    if made is not None and stopped:
        lost = sum((one.reason or "").startswith(NOT_TRIED) for one in machine.outcomes)
        made = (
            made.count("replay.stopped", lost, f"{stopped}; operators that were not tried", "data_loss")
            if lost
            else made.count("replay.stopped", 1, f"{stopped}; all operators were tried, repeats are fewer")
        )
    return ComputeReplay(
        coverage_table(machine),
        _recorded_ns(trace, machine.program),
        times,
        machine.peak_bytes,
        made,
        machine.saved.used,
        machine.saved.refused,
        stopped,
        failed,
    )


def _plan_passes(warmup: int, repeats: int, traced: bool) -> Iterator[tuple[str, str]]:
    """What each pass after the rehearsal is for, and its name for who waits."""
    yield from ((_WARMING, f"pass {turn} of {warmup} to warm up") for turn in range(1, warmup + 1))
    yield from ((_TIMED, f"repeat {turn} of {repeats}") for turn in range(1, repeats + 1))
    if traced:
        yield _TRACED, "the pass for the trace"


def prepare_executor(
    trace: Trace,
    device: str = "cpu",
    *,
    namespaces: frozenset[str] = frozenset({"aten"}),
    step: int | None = None,
    max_bytes: int | None = None,
    progress: OnStep = lambda step: None,
    note: Note = lambda line: None,
    leave_out: Mapping[int, str] = MappingProxyType({}),
    resources: Path | None = None,
    gpu: int = 0,
) -> Executor:
    """The operators of a linked trace, rehearsed on a device: of several GPUs on this one. Other arguments and errors
    as for `replay`; KeyboardInterrupt is raised."""
    machine = _create_executor(trace, device, namespaces, step, resources, gpu)
    with _trial_run(machine, max_bytes, None, progress, note, leave_out):
        if machine.stopped == INTERRUPTED:
            raise KeyboardInterrupt
    return machine


@contextlib.contextmanager
def _trial_run(
    machine: Executor,
    max_bytes: int | None,
    until: float | None,
    progress: OnStep,
    note: Note,
    leave_out: Mapping[int, str],
) -> Iterator[None]:
    """With the machine rehearsed, but for what does not fit into memory, and what it may take bounded."""
    import torch

    on = machine.device.type
    limit = memory_limits.memory_limit(on, max_bytes)
    if limit is not None:
        # What is left out from the start was so in an earlier process, which has told.
        once = note if not leave_out else lambda line: None
        leave_out = {**_find_oversized(machine.program, limit, once), **leave_out}
    pace = TrialProgress(machine.program.steps, until)
    said = time.monotonic()

    def begin(step: ProgramStep) -> None:
        nonlocal said
        pace.next()
        progress(step)
        if (now := time.monotonic()) > said + SLOW_PASS_S:
            said = now
            left = f"about {pace.left_s():,.0f} s to go"
            note(f"rehearsing: {pace.tried:,} of {pace.total:,} operators tried, {left}, now {step.name}")

    torch.ones(1 << 17).add(1)  # threads are started before memory for their stacks is bounded
    with memory_limits.limit_memory(limit) if on == "cpu" and limit is not None else contextlib.nullcontext():
        machine.trial_run(begin, leave_out)
        yield


def _find_oversized(todo: Program, limit: int, note: Note) -> Mapping[int, str]:
    """Node -> why it does not fit."""
    bare = memory_limits.estimate_memory(todo).bytes
    (
        memory_limits.return_freed_memory
        if bare * memory_limits.FRAGMENTATION_OVERHEAD > limit
        else memory_limits.keep_freed_memory
    )()
    whole = bare * memory_limits.WORKING_OVERHEAD
    if whole <= limit:
        return {}
    beyond = memory_limits.estimate_memory(todo, limit / memory_limits.WORKING_OVERHEAD).beyond
    note(
        f"it needs about {whole / 1e9:,.1f} GB at once and may take {limit / 1e9:,.1f} GB: {len(beyond):,} of "
        f"{len(todo.steps):,} operators do not fit and are left out; --max-memory {math.ceil(whole / 1e9)} has room "
        "for all, --step N runs one step, and --device meta needs no memory"
    )
    return beyond


def _create_executor(
    trace: Trace,
    device: str,
    namespaces: frozenset[str],
    step: int | None,
    resources: Path | None,
    gpu: int,
) -> Executor:
    """The operators of a trace on a device, of which none was tried."""
    import torch

    from etloom.replayer.compute.executor import Executor
    from etloom.replayer.compute.program import build_program

    if device not in DEVICES:
        raise UnknownName("device", device, DEVICES, option="device")
    if device == "cuda" and not torch.cuda.is_available():
        raise EtloomError("this torch sees no GPU", remedy="--device cpu, or meta for shapes only")
    if device == "cuda":
        # Slurm may show each process of a host its own GPU alone.
        torch.cuda.set_device(gpu % torch.cuda.device_count())
    return Executor(build_program(trace, namespaces, step), torch.device(device), resources)


def _recorded_ns(trace: Trace, todo: Program) -> int | None:
    ran = pl.DataFrame({"node": [step.node for step in todo.steps]}, schema={"node": pl.UInt32})
    timed = trace.links.join(ran, on="node", how="semi").join(
        trace.events.select("ts", "dur", event="id"), on="event"
    )
    span = timed.select((pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()).item()
    return span if isinstance(span, int) else None


def coverage_table(machine: Executor) -> pl.DataFrame:
    """What became of each recorded operator in the rehearsal: a row a name, result and reason (COVERAGE)."""
    todo = machine.program

    def rows() -> Iterator[tuple[str, str, str | None, int | None]]:
        for step, outcome in zip(todo.steps, machine.outcomes, strict=True):
            yield step.name, outcome.result, outcome.reason, step.recorded_ns
        for left in todo.left_out:
            result = "communication" if left.is_communication else "skipped"
            yield left.name, result, left.reason, left.recorded_ns

    names = ("name", "result", "reason", "recorded_ns")
    found = pl.DataFrame(list(rows()), schema={name: COVERAGE_COLUMNS[name] for name in names}, orient="row")
    computes = pl.col("result") != "communication"
    known = pl.col("recorded_ns").count() > 0
    return (
        found.group_by("name", "result", "reason")
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.when(known).then(pl.col("recorded_ns").sum()))
        .with_columns(
            share_of_count_pct=pl.when(computes).then(
                100 * pl.col("count") / pl.col("count").filter(computes).sum()
            ),
            share_of_time_pct=pl.when(computes).then(
                100 * pl.col("recorded_ns") / pl.col("recorded_ns").filter(computes).sum()
            ),
        )
        .select(*COVERAGE_COLUMNS)
        .sort("recorded_ns", "count", "name", descending=[True, True, False], nulls_last=True)
    )
