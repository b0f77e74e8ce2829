"""Replays the recorded operators of a rank in this process, in recorded order, and measures the duration."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import polars as pl

from etloom.core.errors import EtloomError, UnknownName
from etloom.core.intervals import Intervals
from etloom.core.text import count_noun
from etloom.core.trace import Trace
from etloom.replayer.compute import memory_limits
from etloom.replayer.compute.compute_options import DEVICES, ComputeHooks, ComputeOptions
from etloom.replayer.compute.progress import INTERRUPTED, NOT_TRIED, TIME_LIMIT_REACHED, TrialProgress
from etloom.timeline.activity import has_device_events

if TYPE_CHECKING:
    from etloom.replayer.compute.executor import Executor
    from etloom.replayer.compute.program import Program
    from etloom.replayer.compute.program_steps import ProgramStep

SLOW_PASS_S = 5.0
"""Passes that take longer are announced, and progress is reported this often."""
_WARMUP, _TIMED, _TRACED = "warmup", "timed", "traced"
_DEFAULTS, _NO_HOOKS = ComputeOptions(), ComputeHooks()
_SKIP_NONE: Mapping[int, str] = MappingProxyType({})
COVERAGE_COLUMNS = {
    "name": pl.String,
    "result": pl.String,
    "reason": pl.String,
    "count": pl.Int64,
    "share_of_count_pct": pl.Float64,
    "recorded_ns": pl.Int64,
    "share_of_time_pct": pl.Float64,
}
"""Columns of `ComputeReplay.coverage`. result: replayed, substituted, skipped or communication. Shares are of all
operators but communication, in percent; times are inclusive host times, null if the recording has none."""


@dataclass(frozen=True, eq=False)
class ComputeReplay:
    """The result of a computation replay: coverage of the operators, durations of the repeats, and a trace.

    Attributes:
        coverage: One row per name, result and reason (COVERAGE_COLUMNS); most time (or most calls) first.
        recorded_ns: Recorded time from the start of the first replayed operator to the end of the last; None if no
            times were recorded.
        repeats_ns: Duration of each timed repeat.
        peak_bytes: Maximum memory of tensors between operators; operators take more while they run.
        trace: The replay as a linked trace: one profiled pass, else the trial run. None on meta and if not requested.
        saved_tensors: Number of tensors with values that were saved next to the trace.
        unused_tensors: Reason -> number of saved tensors that were not used.
        stopped: Why the replay ended early; this is also a row of the trace's stats.
        failed: An operator failed that had run before.
        threads: Threads of an operator on a CPU.
        is_of_gpu: The recording has GPU activity.
    """

    coverage: pl.DataFrame
    recorded_ns: int | None
    repeats_ns: list[int]
    peak_bytes: int
    trace: Trace | None
    saved_tensors: int = 0
    unused_tensors: Mapping[str, int] = field(default_factory=dict)
    stopped: str | None = None
    failed: bool = False
    threads: int = 1
    is_of_gpu: bool = False

    def covered(self, by: str = "count") -> float | None:
        """Return the share of compute operators, by number or recorded time, that were replayed or substituted.

        Args:
            by: "count" or "recorded_ns".

        Returns:
            A number from 0 to 1; None if it is not known.
        """
        computation = self.coverage.filter(pl.col("result") != "communication")
        total = float(computation[by].sum())
        if not total:
            return None
        return 1 - float(computation.filter(pl.col("result") == "skipped")[by].sum()) / total


def replay_operators(
    trace: Trace,
    options: ComputeOptions = _DEFAULTS,
    hooks: ComputeHooks = _NO_HOOKS,
    *,
    skip: Mapping[int, str] = _SKIP_NONE,
    resources: Path | None = None,
) -> ComputeReplay:
    """Replay the recorded operators of a linked trace in this process, and measure how long they take.

    A trial run finds out which operators can run; these are then repeated. If the user interrupts (KeyboardInterrupt),
    the result has what was measured until then.

    Args:
        trace: A linked trace with an execution trace.
        options: How the operators are replayed.
        hooks: Functions called on the way.
        skip: Node -> reason why its operator is not tried.
        resources: Folder with tensors saved next to the trace (`saved_tensors.resources_folder`).

    Raises:
        EtloomError: The trace has nothing to replay, or the device does not exist.
    """
    import torch

    from etloom.replayer.compute.replay_trace import trial_run_trace

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    executor = _create_executor(trace, options, resources)
    with _trial_run(executor, options, hooks, skip):
        passes = _run_passes(executor, trace, options, hooks)
    replayed = passes.trace
    if options.trace and replayed is None and options.device != "meta":
        replayed = trial_run_trace(executor, trace)
    if replayed is not None and passes.stopped:
        replayed = _count_stopped(replayed, executor, passes.stopped)
    return ComputeReplay(
        coverage_table(executor),
        _recorded_ns(trace, executor.program, options.subgraph is not None),
        passes.repeats_ns,
        executor.peak_bytes,
        replayed,
        executor.saved.used,
        executor.saved.refused,
        passes.stopped,
        passes.failed,
        torch.get_num_threads(),
        has_device_events(trace),
    )


@dataclass
class _Passes:
    """Results of the passes after the trial run: durations (ns), profiled trace, and the reason of an early end."""

    stopped: str | None
    failed: bool = False
    repeats_ns: list[int] = field(default_factory=list)
    trace: Trace | None = None


def _run_passes(
    executor: Executor, recording: Trace, options: ComputeOptions, hooks: ComputeHooks
) -> _Passes:
    """Run the warm-up, timed and profiled passes, until the user interrupts, time runs out, or an operator fails."""
    passes = _Passes(executor.stopped)
    try:
        hooks.on_all_tried()
        if options.device != "meta" and not executor.stopped:
            _measure_passes(executor, recording, options, hooks, passes)
    except KeyboardInterrupt:
        passes.stopped = INTERRUPTED
    except EtloomError as error:
        passes.stopped, passes.failed = str(error), True
    return passes


def _measure_passes(
    executor: Executor, recording: Trace, options: ComputeOptions, hooks: ComputeHooks, passes: _Passes
) -> None:
    from etloom.replayer.compute.replay_trace import profile_pass

    expected_ns = sum(outcome.duration_ns for outcome in executor.outcomes)
    count = options.warmup + options.repeats + (1 if options.trace else 0)
    if count * expected_ns > 1e9 * SLOW_PASS_S:
        hooks.notify(_describe_passes(options, expected_ns))
    for kind, name in _plan_passes(options):
        if options.deadline is not None and time.monotonic() + expected_ns / 1e9 > options.deadline:
            passes.stopped = TIME_LIMIT_REACHED
            return
        start = time.perf_counter_ns()
        if kind == _TRACED:
            passes.trace = profile_pass(executor, recording)
        else:
            executor.run()
        expected_ns = time.perf_counter_ns() - start
        if kind == _TIMED:
            passes.repeats_ns.append(expected_ns)
        if expected_ns > 1e9 * SLOW_PASS_S:
            hooks.notify(f"{name} took {expected_ns / 1e9:,.1f} s")


def _plan_passes(options: ComputeOptions) -> Iterator[tuple[str, str]]:
    """Yield (kind, name for messages) of each pass after the trial run: warm-up, timed and traced passes."""
    warmup, repeats = options.warmup, options.repeats
    yield from ((_WARMUP, f"warm-up pass {number} of {warmup}") for number in range(1, warmup + 1))
    yield from ((_TIMED, f"repeat {number} of {repeats}") for number in range(1, repeats + 1))
    if options.trace:
        yield _TRACED, "the pass for the trace"


def _describe_passes(options: ComputeOptions, expected_ns: int) -> str:
    warmup = ""
    if options.warmup:
        warmup = f", after {count_noun(options.warmup, 'warm-up pass', 'warm-up passes')}"
    trace = ", and one more pass for the trace" if options.trace else ""
    repeats = f"{count_noun(options.repeats, 'repeat')} of about {expected_ns / 1e9:,.1f} s each follow"
    return f"all operators were tried; {repeats}{warmup}{trace}"


def _count_stopped(replayed: Trace, executor: Executor, stopped: str) -> Trace:
    """Add a row to the trace's stats: the replay ended early, the reason, and how many operators were not tried."""
    not_tried = sum((outcome.reason or "").startswith(NOT_TRIED) for outcome in executor.outcomes)
    if not_tried:
        return replayed.count(
            "replay.stopped", not_tried, f"{stopped}; operators that were not tried", "data_loss"
        )
    return replayed.count(
        "replay.stopped", 1, f"{stopped}; all operators were tried, but some repeats are missing"
    )


def prepare_executor(
    trace: Trace,
    options: ComputeOptions = _DEFAULTS,
    hooks: ComputeHooks = _NO_HOOKS,
    *,
    skip: Mapping[int, str] = _SKIP_NONE,
    resources: Path | None = None,
) -> Executor:
    """Create an executor for the operators of a linked trace, try each operator once, and return the executor.

    Arguments and errors are those of `replay_operators`; KeyboardInterrupt is raised.
    """
    executor = _create_executor(trace, options, resources)
    with _trial_run(executor, replace(options, deadline=None), hooks, skip):
        if executor.stopped == INTERRUPTED:
            raise KeyboardInterrupt
    return executor


@contextlib.contextmanager
def _trial_run(
    executor: Executor, options: ComputeOptions, hooks: ComputeHooks, skip: Mapping[int, str]
) -> Iterator[None]:
    """Context manager: try all operators that fit into memory, then run the with block under the same memory limit."""
    import torch

    device = executor.device.type
    limit = memory_limits.memory_limit(device, options.max_bytes)
    if limit is not None:
        # If operators are skipped from the start, an earlier process has printed the message.
        oversized = _find_oversized(executor.program, limit, _NO_HOOKS if skip else hooks)
        skip = {**oversized, **skip}
    progress = TrialProgress(executor.program.steps, options.deadline)
    last_report = time.monotonic()

    def begin(step: ProgramStep) -> None:
        nonlocal last_report
        progress.begin_next()
        hooks.on_step(step)
        if (now := time.monotonic()) > last_report + SLOW_PASS_S:
            last_report = now
            counts = f"{progress.tried:,} of {progress.total:,} operators tried"
            hooks.notify(
                f"trial run: {counts}, about {progress.remaining_s():,.0f} s remaining, now {step.name}"
            )

    torch.ones(1 << 17).add(1)  # starts the threads, before memory for their stacks is limited
    is_limited = device == "cpu" and limit is not None
    with memory_limits.limit_memory(limit or 0) if is_limited else contextlib.nullcontext():
        executor.trial_run(begin, skip)
        yield


def _find_oversized(program: Program, limit: int, hooks: ComputeHooks) -> Mapping[int, str]:
    """Return node -> reason for operators that do not fit into memory; also set whether malloc returns freed memory."""
    storage_bytes = memory_limits.estimate_memory(program).bytes
    if storage_bytes * memory_limits.FRAGMENTATION_OVERHEAD > limit:
        memory_limits.return_freed_memory()
    else:
        memory_limits.keep_freed_memory()
    required = storage_bytes * memory_limits.WORKING_OVERHEAD
    if required <= limit:
        return {}
    oversized = memory_limits.estimate_memory(program, limit / memory_limits.WORKING_OVERHEAD).oversized
    hooks.notify(
        f"the replay needs about {required / 1e9:,.1f} GB at once, and its limit is {limit / 1e9:,.1f} GB: "
        f"{len(oversized):,} of {len(program.steps):,} operators do not fit and are skipped; "
        f"--max-memory {math.ceil(required / 1e9)} fits all, --step N replays one step, --device meta needs no memory"
    )
    return oversized


def _create_executor(trace: Trace, options: ComputeOptions, resources: Path | None) -> Executor:
    """Return an executor of the operators of a trace, before its trial run."""
    import torch

    from etloom.replayer.compute.executor import Executor
    from etloom.replayer.compute.program import build_program

    if options.device not in DEVICES:
        raise UnknownName("device", options.device, DEVICES, option="device")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise EtloomError("torch finds no GPU", remedy="use --device cpu, or meta for shapes only")
        # Slurm may show each process of a host only its own GPU.
        torch.cuda.set_device(options.gpu % torch.cuda.device_count())
    program = build_program(trace, options.namespaces, options.step, options.subgraph)
    return Executor(program, torch.device(options.device), resources)


def _recorded_ns(trace: Trace, program: Program, is_part: bool) -> int | None:
    """Return the recorded time (ns) of the operators: first start to last end; of a step or subgraph, the busy time."""
    replayed = pl.DataFrame({"node": [step.node for step in program.steps]}, schema={"node": pl.UInt32})
    timed = trace.links.join(replayed, on="node", how="semi").join(
        trace.events.select("ts", "dur", event="id"), on="event"
    )
    if is_part:
        times = timed.select("ts", end=pl.col("ts") + pl.col("dur")).drop_nulls()
        return Intervals.of(times["ts"].to_numpy(), times["end"].to_numpy()).total or None
    span = timed.select((pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()).item()
    return span if isinstance(span, int) else None


def coverage_table(executor: Executor) -> pl.DataFrame:
    """Count the recorded operators by name, trial-run result and reason (COVERAGE_COLUMNS), longest time first."""
    program = executor.program

    def rows() -> Iterator[tuple[str, str, str | None, int | None]]:
        for step, outcome in zip(program.steps, executor.outcomes, strict=True):
            yield step.name, outcome.result, outcome.reason, step.recorded_ns
        for operator in program.omitted:
            result = "communication" if operator.is_communication else "skipped"
            yield operator.name, result, operator.reason, operator.recorded_ns

    names = ("name", "result", "reason", "recorded_ns")
    table = pl.DataFrame(list(rows()), schema={name: COVERAGE_COLUMNS[name] for name in names}, orient="row")
    computes = pl.col("result") != "communication"
    has_times = pl.col("recorded_ns").count() > 0
    return (
        table.group_by("name", "result", "reason")
        .agg(pl.len().cast(pl.Int64).alias("count"), pl.when(has_times).then(pl.col("recorded_ns").sum()))
        .with_columns(
            share_of_count_pct=pl.when(computes).then(
                100.0 * pl.col("count") / pl.col("count").filter(computes).sum()
            ),
            share_of_time_pct=pl.when(computes).then(
                100.0 * pl.col("recorded_ns") / pl.col("recorded_ns").filter(computes).sum()
            ),
        )
        .select(*COVERAGE_COLUMNS)
        .sort("recorded_ns", "count", "name", descending=[True, True, False], nulls_last=True)
    )
