"""Full replay: runs the recorded operators and communication calls of each rank together, in their recorded order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.text import count_noun
from etloom.core.trace import Job
from etloom.replayer.comms.comms_options import (
    Callbacks,
    CommsOptions,
    RankWork,
    Rendezvous,
    check_backend,
    resolve_options,
)
from etloom.replayer.comms.plan_builder import PlanOptions, plan_early, plan_replay
from etloom.replayer.compute.compute_options import ComputeHooks, ComputeOptions
from etloom.replayer.compute.node_selection import select_nodes
from etloom.replayer.launch_environment import Process
from etloom.replayer.plan import Plan

if TYPE_CHECKING:
    from etloom.replayer.comms.session import CommsReplay


@dataclass(frozen=True, eq=False)
class FullReplay:
    """The result of replaying the operators and the communication of a job together.

    Attributes:
        comms: The communication of all ranks.
        coverage: Outcome of the operators of rank 0 (`operator_replay.COVERAGE_COLUMNS`).
        outcomes: Outcome of each of its operators that can run in principle: replayed, substituted or skipped.
        threads: Threads of an operator on a CPU.
    """

    comms: CommsReplay
    coverage: pl.DataFrame
    outcomes: tuple[str, ...]
    threads: int


def replay_full(
    open_job: Callable[[], Job],
    options: CommsOptions,
    callbacks: Callbacks,
    *,
    path: Path | None = None,
    namespaces: frozenset[str] = frozenset({"aten"}),
    process: Process | None = None,
    rendezvous: Rendezvous = Rendezvous(),  # noqa: B008
) -> FullReplay | None:
    """Replay the operators and the communication of a job; every process calls this function.

    Communication uses buffers of the recorded sizes, not results of operators. Each rank first tries its operators in a
    child process; those that crash it are skipped.

    Args:
        open_job: Returns the linked job; called on every rank.
        options: How communication is run, and how often. Backend and device may be "auto".
        callbacks: Hooks of the session (``prepare`` is not used).
        path: The run, next to which tensors may have been saved.
        namespaces: Namespaces of the operators that may run.
        process: This process (default: as the launcher's environment variables say).
        rendezvous: Where the processes meet.

    Returns:
        The result on rank 0, None on the other ranks.

    Raises:
        EtloomError: The plan or the run fails; raised on every rank.
        KeyboardInterrupt: With the position at which the replay was interrupted.
    """
    # torch reports a lost connection with pages of messages of its own; the watchdog reports it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    process = process or Process.current()
    if options.backend != "auto":
        check_backend(options.backend)
    options = resolve_options(options)
    compute = ComputeOptions(options.device, gpu=process.local_rank, namespaces=namespaces)
    computation = _RankComputation(open_job, compute, process, callbacks.notify, path)
    make_plan = plan_early(computation.make_plan, process.world_size, path)
    from etloom.replayer.comms.session import run_session

    hooks = replace(callbacks, prepare=computation.prepare)
    communication = run_session(make_plan, options, process, rendezvous, hooks)
    if communication is None:
        return None
    import torch

    return FullReplay(communication, computation.coverage, computation.outcomes, torch.get_num_threads())


class _RankComputation:
    """Replays this rank's operators between its communication calls, after each operator has run once as a trial."""

    coverage: pl.DataFrame
    outcomes: tuple[str, ...]

    def __init__(
        self,
        open_job: Callable[[], Job],
        options: ComputeOptions,
        process: Process,
        notify: Callable[[str], None],
        path: Path | None,
    ) -> None:
        self._open_job = open_job
        self._options = options
        self._process = process
        self._notify = notify
        self._path = path

    @cached_property
    def _job(self) -> Job:
        return self._open_job()

    def make_plan(self, world_size: int) -> Plan:
        if len(self._job) != world_size:
            raise EtloomError(
                f"{world_size} processes for {len(self._job)} recorded ranks",
                remedy=f"start {len(self._job)} processes",
            )
        for trace in self._job.values():
            select_nodes(trace)
        return plan_replay(self._job, world_size, PlanOptions(operators=True))

    def prepare(self, report: Callable[[str], None]) -> RankWork:
        """Run each operator of this rank once as a trial; return callbacks to run them between communication calls."""
        from etloom.replayer.compute.operator_replay import coverage_table, prepare_executor
        from etloom.replayer.compute.saved_tensors import resources_folder
        from etloom.replayer.compute.trial import find_crashing_operators

        rank = sorted(self._job)[self._process.rank]
        trace = self._job[rank]
        resources = None if self._path is None else resources_folder(self._path, trace)
        report("trying its operators")
        # A kernel that ends its process must not end a rank that others wait for.
        crashing = find_crashing_operators(trace, self._options, resources)
        is_first = self._process.rank == 0
        executor = prepare_executor(
            trace,
            self._options,
            ComputeHooks(
                on_step=lambda step: report(f"trying {step.name} (node {step.node})"),
                notify=self._notify if is_first else lambda line: None,
            ),
            skip=crashing,
            resources=resources,
        )
        self.coverage = coverage_table(executor)
        self.outcomes = tuple(outcome.result for outcome in executor.outcomes)
        self._report_skipped(crashing)
        return RankWork(executor.advance, executor.describe_position)

    def _report_skipped(self, crashing: Mapping[int, str]) -> None:
        """Print the operators that this rank skips; ranks other than rank 0 print only operators that crashed."""
        rank, reasons = self._process.rank, set(crashing.values())
        for row in self.coverage.iter_rows(named=True):
            if row["result"] == "skipped" and (rank == 0 or row["reason"] in reasons):
                calls = count_noun(row["count"], "call")
                self._notify(f"rank {rank} skips {calls} of {row['name']}: {row['reason']}")
