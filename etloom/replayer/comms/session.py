"""Runs a replay on every process from start to end: rank 0 plans, all ranks run, rank 0 gathers the times."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.replayer.comms.callbacks import Callbacks, Prepare
from etloom.replayer.comms.comms_options import CommsOptions, Rendezvous
from etloom.replayer.comms.plan_builder import check_world_size
from etloom.replayer.comms.rendezvous import connect_store, rendezvous_address
from etloom.replayer.comms.results import build_job, call_table, pass_table, summarize_calls
from etloom.replayer.comms.runner import CallTimes, Runner, process_group
from etloom.replayer.comms.watchdog import HEARTBEAT_S, PLANNING, SUSPECT_LIMIT_S, Watchdog, clock_domain
from etloom.replayer.launch_environment import Process
from etloom.replayer.plan import Call, Plan, RankPlan

_NO_TIMEOUT = timedelta(days=7)
_CALLS_PER_KEY = 10_000
"""Calls in one value of the store. Encoding it takes a fraction of a second, in which no other thread runs, not even
the one that sends heartbeats."""


@dataclass(frozen=True, eq=False)
class CommsReplay:
    """The result of a communication replay.

    Attributes:
        plan: The plan that was run.
        options: The options it was run with.
        calls: One row per call, rank and repeat (`results.CALL_COLUMNS`).
        passes: One row per rank and repeat (`results.PASS_COLUMNS`).
    """

    plan: Plan
    options: CommsOptions
    calls: pl.DataFrame
    passes: pl.DataFrame

    @property
    def summary(self) -> pl.DataFrame:
        """Latency and bandwidth of the calls: one row per collective, group and message size (`SUMMARY_COLUMNS`)."""
        return self.summarize()

    def summarize(self, per: str = "group") -> pl.DataFrame:
        """Summarize the calls per "group", over "all" groups of equal size, or per "call"; see `summarize_calls`."""
        return summarize_calls(self.calls, per)

    @property
    def job(self) -> Job:
        """The measured calls of the last repeat as a linked Job, one Trace per rank."""
        return build_job(self.plan, self.calls, self.options.backend)


def run_session(
    make_plan: Callable[[int], Plan],
    options: CommsOptions,
    process: Process,
    rendezvous: Rendezvous,
    callbacks: Callbacks,
) -> CommsReplay | None:
    """Run a replay: share the plan, run each rank's calls, and gather the times. Every process calls this function.

    Args:
        make_plan: World size -> plan; called on rank 0 only.

    Returns:
        The result on rank 0, None on the other ranks.

    Raises:
        EtloomError: On every rank, if the plan or the run fails.
        KeyboardInterrupt: With the call at which the replay was interrupted.
    """
    # torch warns about renamed functions that it calls itself, and that MPI assigns ranks; neither concerns the replay.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed")
    store = connect_store(
        process, *rendezvous_address(rendezvous.address, rendezvous.port), options.timeout_s
    )
    with Watchdog(store, process, callbacks.end_process) as watchdog:
        try:
            watchdog.set_activity(PLANNING)
            plan, rank_plan = _share_plan(store, process, make_plan)
            times = _run_rank(store, process, rank_plan, options, callbacks.prepare, watchdog)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted at {watchdog.describe()}") from None
        except RuntimeError as error:
            raise EtloomError(
                f"stopped at {watchdog.describe()}: {_failure_reason(error, watchdog)}",
                where=f"rank {process.rank}",
            ) from error
    if plan is None or times is None:
        return None
    return CommsReplay(plan, options, call_table(plan, times), pass_table(times))


def _failure_reason(error: RuntimeError, watchdog: Watchdog) -> str:
    """Describe a failure in a line: the lost process, or torch's first sentence and the activity of other ranks.

    torch's messages about a lost peer take many forms; the watchdog knows which process it is.
    """
    first = " ".join(re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0].split())[:200]
    is_connection_lost = re.search(r"(?i)connection|socket|closed|reset by", first) is not None
    lost = watchdog.find_lost(SUSPECT_LIMIT_S + 2 * HEARTBEAT_S if is_connection_lost else 0)
    return f"{lost} ({first})" if lost else f"{first}; {watchdog.describe_others()}"


def _run_rank(
    store: Any,
    process: Process,
    plan: RankPlan,
    options: CommsOptions,
    prepare: Prepare,
    watchdog: Watchdog,
) -> dict[int, CallTimes] | None:
    """Run the calls of this rank; return the times of all ranks on rank 0, None on the others."""
    watchdog.set_activity("preparing")
    work = prepare(watchdog.set_activity)
    _wait_until_all_ready(store, process)
    with process_group(process, store, options):
        runner = Runner(plan, process, options, work.run_operators)
        watchdog.describe = lambda: work.describe() or runner.describe_position()
        times = runner.run()
        watchdog.set_activity("gathering")
        return _gather_times(store, times, process)


def _wait_until_all_ready(store: Any, process: Process) -> None:
    """Wait without a time limit until all processes are prepared; the watchdog detects lost processes."""
    store.set(f"ready/{process.rank}", "1")
    store.wait([f"ready/{rank}" for rank in range(process.world_size)], _NO_TIMEOUT)


def _share_plan(
    store: Any, process: Process, make_plan: Callable[[int], Plan]
) -> tuple[Plan | None, RankPlan]:
    """Send each rank its part of the plan as JSON through the store.

    Returns:
        The whole plan (on rank 0, which makes it; None on the others) and this rank's part.

    Raises:
        EtloomError: On every rank, if planning fails.
    """
    size = process.world_size
    if process.rank == 0:
        try:
            plan = check_world_size(make_plan(size), size)
        except EtloomError as error:
            store.set("plan", json.dumps({"error": str(error)}))
            raise
        groups = tuple(plan.groups)
        for rank in range(1, size):
            _send_calls(store, rank, plan.calls[rank])
        store.set("plan", json.dumps({"groups": groups}))
        return plan, RankPlan(plan.calls[0], groups, size)
    store.wait(["plan"], _NO_TIMEOUT)
    message = json.loads(store.get("plan"))
    if "error" in message:
        raise EtloomError(message["error"])
    groups = tuple(map(tuple, message["groups"]))
    return None, RankPlan(tuple(_receive_calls(store, process.rank)), groups, size)


def _send_calls(store: Any, rank: int, calls: Sequence[Call]) -> None:
    starts = range(0, len(calls), _CALLS_PER_KEY)
    for chunk, start in enumerate(starts):
        rows = [vars(call) for call in calls[start : start + _CALLS_PER_KEY]]
        store.set(f"plan/{rank}/{chunk}", json.dumps(rows))
    store.set(f"plan/{rank}", str(len(starts)))


def _receive_calls(store: Any, rank: int) -> Iterator[Call]:
    for chunk in range(int(store.get(f"plan/{rank}"))):
        for row in json.loads(store.get(f"plan/{rank}/{chunk}")):
            yield Call(**_lists_to_tuples(row))


def _lists_to_tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def _gather_times(store: Any, times: CallTimes, process: Process) -> dict[int, CallTimes] | None:
    """Send the times of all ranks to rank 0 through the key-value store; return them on rank 0, None on others.

    Processes of one host have the same clock, and therefore the same zero. Those of other hosts have their own: they
    started together as closely as a barrier allows.
    """
    shape = times.issued.shape
    if process.rank:
        store.set(
            f"times/{process.rank}", np.stack((times.issued, times.returned, times.completed)).tobytes()
        )
        store.set(f"passes/{process.rank}", np.stack((times.span, times.blocked)).tobytes())
        store.set(f"zero/{process.rank}", f"{times.zero} {shape[0]} {shape[1]} {clock_domain()}")
        store.wait(["taken"], _NO_TIMEOUT)
        return None
    gathered = {0: times}
    zeros = {clock_domain(): times.zero}
    for rank in range(1, process.world_size):
        store.wait([f"zero/{rank}"], _NO_TIMEOUT)
        *numbers, domain = store.get(f"zero/{rank}").decode().split()
        zero, repeats, count = map(int, numbers)
        zero = zeros.setdefault(domain, zero)
        issued, returned, completed = np.frombuffer(store.get(f"times/{rank}"), np.int64).reshape(
            3, repeats, count
        )
        span, blocked = np.frombuffer(store.get(f"passes/{rank}"), np.int64).reshape(2, repeats)
        gathered[rank] = CallTimes(issued, returned, completed, zero, span, blocked)
    store.set("taken", "1")
    return gathered
