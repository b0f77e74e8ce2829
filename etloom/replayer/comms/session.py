"""A replay from start to end, on every process: plan on rank 0, run together, gather on rank 0."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import polars as pl

from etloom.core.errors import EtloomError
from etloom.replayer.comms.plan_options import check_world_size
from etloom.replayer.comms.rendezvous import rendezvous_address
from etloom.replayer.comms.results import call_table, pass_table, summarize_calls
from etloom.replayer.comms.watchdog import (
    HEARTBEAT_S,
    PLANNING,
    SUSPECT_LIMIT_S,
    Process,
    Watchdog,
    clock_domain,
    connect_store,
)
from etloom.replayer.plan import Call, Plan, RankPlan

_NO_TIMEOUT = timedelta(days=7)
_CALLS_PER_KEY = 10_000
"""Calls in one value of the store: a fraction of a second, in which no other thread runs, the heart beat neither."""


@dataclass(frozen=True, eq=False)
class CommsReplay:
    """calls: `results.CALLS`; sums: `results.SUMS`; passes: `results.PASSES`."""

    plan: Plan
    calls: pl.DataFrame
    sums: pl.DataFrame
    passes: pl.DataFrame


@dataclass(frozen=True)
class RankWork:
    """What a rank does beside communication. between: called with a node to do what it computed before that, and with
    None at the end, as for `comms.Runner`. where: what it is doing just now, None where nothing."""

    between: Callable[[int | None], None] | None = None
    where: Callable[[], str | None] = lambda: None


Prepare = Callable[[Callable[[str], None]], RankWork]


def run_session(
    make: Callable[[int], Plan],
    options: Any,
    *,
    place: Process | None = None,
    address: str | None = None,
    port: int | None = None,
    prepare: Prepare = lambda tell: RankWork(),
    end: Callable[[str], None],
) -> CommsReplay | None:
    """Replay on all processes; the result on rank 0, None on the others.

    make: world size -> plan, called on rank 0 alone. prepare: called on every rank when the plan stands, with what to
    tell the others it is doing; gives what the rank does between calls. end: ends this process with a reason, when
    another one is gone.
    Raises EtloomError on every rank where the plan or the run fails; a KeyboardInterrupt says where.
    """
    # torch announces new names of what it calls itself, and that MPI counts ranks itself: nothing of the run.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed")
    place = place or Process.here()
    store = connect_store(place, *rendezvous_address(address, port), options.timeout_s)
    with Watchdog(store, place, end) as watch:
        try:
            plan, gathered = _run_rank(store, place, make, options, prepare, watch)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted at {watch.at()}") from None
        except RuntimeError as error:
            raise EtloomError(
                f"stopped at {watch.at()}: {_failure_reason(error, watch)}", where=f"rank {place.rank}"
            ) from error
    if plan is None or gathered is None:
        return None
    table = call_table(plan, gathered)
    return CommsReplay(plan, table, summarize_calls(table), pass_table(gathered))


def _failure_reason(error: RuntimeError, watch: Watchdog) -> str:
    """torch's words for a peer that is gone are many; the watch knows which one. Of a hang it says who is where."""
    first = " ".join(re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0].split())[:200]
    broken = re.search(r"(?i)connection|socket|closed|reset by", first) is not None
    lost = watch.lost(SUSPECT_LIMIT_S + 2 * HEARTBEAT_S if broken else 0)
    return f"{lost} ({first})" if lost else f"{first}; {watch.standing()}"


def _run_rank(
    store: Any,
    place: Process,
    make: Callable[[int], Plan],
    options: Any,
    prepare: Prepare,
    watch: Watchdog,
) -> tuple[Plan | None, dict[int, Any] | None]:
    from etloom.replayer.comms.runner import Runner, process_group

    watch.tell(PLANNING)
    plan, part = _share_plan(store, place, make)
    watch.tell("preparing")
    work = prepare(watch.tell)
    _wait_until_all_ready(store, place)
    with process_group(place, store, options):
        runner = Runner(part, place, options, work.between)
        watch.at = lambda: work.where() or runner.where()
        times = runner.run()
        watch.tell("gathering")
        return plan, _gather_times(store, times, place)


def _wait_until_all_ready(store: Any, place: Process) -> None:
    """Return when all processes are here. How long one prepares nobody knows; the watch sees whether it lives."""
    store.set(f"ready/{place.rank}", "1")
    store.wait([f"ready/{rank}" for rank in range(place.world)], _NO_TIMEOUT)


def _share_plan(store: Any, place: Process, make: Callable[[int], Plan]) -> tuple[Plan | None, RankPlan]:
    """(the plan, on rank 0 that made it, each rank's part of it), as plain JSON through the store; its error on all."""
    if place.rank == 0:
        try:
            plan = check_world_size(make(place.world), place.world)
        except EtloomError as error:
            store.set("plan", json.dumps({"error": str(error)}))
            raise
        groups = tuple(plan.groups)
        for rank in range(1, place.world):
            _send_calls(store, rank, plan.calls[rank])
        store.set("plan", json.dumps({"groups": groups}))
        return plan, RankPlan(plan.calls[0], groups, place.world)
    store.wait(["plan"], _NO_TIMEOUT)
    said = json.loads(store.get("plan"))
    if "error" in said:
        raise EtloomError(said["error"])
    groups = tuple(map(tuple, said["groups"]))
    return None, RankPlan(tuple(_receive_calls(store, place.rank)), groups, place.world)


def _send_calls(store: Any, rank: int, own: Sequence[Call]) -> None:
    starts = range(0, len(own), _CALLS_PER_KEY)
    for chunk, start in enumerate(starts):
        store.set(
            f"plan/{rank}/{chunk}", json.dumps([vars(call) for call in own[start : start + _CALLS_PER_KEY]])
        )
    store.set(f"plan/{rank}", str(len(starts)))


def _receive_calls(store: Any, rank: int) -> Iterator[Call]:
    for chunk in range(int(store.get(f"plan/{rank}"))):
        for one in json.loads(store.get(f"plan/{rank}/{chunk}")):
            yield Call(**_lists_to_tuples(one))


def _lists_to_tuples(one: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}


def _gather_times(store: Any, times: Any, place: Process) -> dict[int, Any] | None:
    """The times of all ranks on rank 0, through the store, which every backend leaves alone.

    Processes of one machine have one clock, and so one zero; those of others set out together as well as they can.
    """
    from etloom.replayer.comms.runner import CallTimes

    shape = times.made.shape
    if place.rank:
        store.set(f"times/{place.rank}", np.stack((times.made, times.returned, times.done)).tobytes())
        store.set(f"passes/{place.rank}", np.stack((times.span, times.blocked)).tobytes())
        store.set(f"zero/{place.rank}", f"{times.zero} {shape[0]} {shape[1]} {clock_domain()}")
        store.wait(["taken"], _NO_TIMEOUT)
        return None
    found = {0: times}
    zeros = {clock_domain(): times.zero}
    for rank in range(1, place.world):
        store.wait([f"zero/{rank}"], _NO_TIMEOUT)
        *numbers, its = store.get(f"zero/{rank}").decode().split()
        zero, repeats, count = map(int, numbers)
        zero = zeros.setdefault(its, zero)
        made, returned, done = np.frombuffer(store.get(f"times/{rank}"), np.int64).reshape(3, repeats, count)
        span, blocked = np.frombuffer(store.get(f"passes/{rank}"), np.int64).reshape(2, repeats)
        found[rank] = CallTimes(made, returned, done, zero, span, blocked)
    store.set("taken", "1")
    return found
