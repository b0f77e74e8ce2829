"""Replays the communication of a job: plans it, runs it on all processes, and returns the measured times."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from etloom.core.trace import Job
from etloom.replayer.comms.comms_options import (
    Callbacks,
    CommsOptions,
    Rendezvous,
    check_backend,
    resolve_options,
)
from etloom.replayer.comms.plan_builder import PlanOptions, plan_early, plan_replay
from etloom.replayer.launch_environment import Process
from etloom.replayer.plan import Plan

if TYPE_CHECKING:
    from etloom.replayer.comms.session import CommsReplay

_LONG_REPLAY_S = 60.0
"""A replay with recorded gaps that takes longer is announced."""


def replay_comms(
    open_job: Callable[[], Job],
    plan_options: PlanOptions,
    options: CommsOptions,
    callbacks: Callbacks,
    *,
    path: Path | None = None,
    process: Process | None = None,
    rendezvous: Rendezvous = Rendezvous(),  # noqa: B008
) -> CommsReplay | None:
    """Replay the communication of a job; every process calls this function.

    Args:
        open_job: Returns the linked job; called on rank 0 only.
        plan_options: The part of the job to replay.
        options: How it is run. Backend and device may be "auto".
        callbacks: Hooks of the session.
        path: The run; if its format is unknown, that is reported before torch is imported.
        process: This process (default: as the launcher's environment variables say).
        rendezvous: Where the processes meet.

    Returns:
        The result on rank 0, None on the other ranks.

    Raises:
        EtloomError: The plan or the run fails; raised on every rank.
        KeyboardInterrupt: With the call at which the replay was interrupted.
    """
    if options.backend != "auto":
        check_backend(options.backend)
    process = process or Process.current()

    def make_plan(world_size: int) -> Plan:
        plan = plan_replay(open_job(), world_size, plan_options)
        if options.timing == "recorded":
            _announce_long_replay(plan, options, callbacks.notify)
        return plan

    early_plan = plan_early(make_plan, process.world_size, path)
    # torch reports a lost connection with pages of messages of its own; the watchdog reports it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from etloom.replayer.comms.session import run_session

    return run_session(early_plan, resolve_options(options), process, rendezvous, callbacks)


def _announce_long_replay(plan: Plan, options: CommsOptions, notify: Callable[[str], None]) -> None:
    passes = options.repeats + options.warmup
    gaps_s = max((sum(call.gap_ns or 0 for call in calls) for calls in plan.calls), default=0) / 1e9
    if passes * gaps_s > _LONG_REPLAY_S:
        notify(f"the recorded gaps between calls are kept: {passes} passes take {passes * gaps_s:,.0f} s")
