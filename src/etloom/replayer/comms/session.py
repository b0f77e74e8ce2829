"""Runs a replay on every process from start to end: rank 0 plans, all ranks run, rank 0 gathers the times."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.trace import Job
from etloom.replayer.comms.comms_options import Callbacks, CommsOptions, Prepare, Rendezvous
from etloom.replayer.comms.plan_builder import check_world_size
from etloom.replayer.comms.results import build_job, call_table, pass_table, summarize_calls
from etloom.replayer.comms.runner import CallTimes, Runner, process_group
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


# Determines the host and port at which the processes of a replay connect, and opens the key-value store there.
#
# Unless the user specifies them, every process derives the same address from what its launcher sets.

FIRST_PORT = 29_501
_PORT_COUNT = 3_000
"""Ports from the first one on; all are below those that Linux assigns automatically."""
_RUN_ID_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("OMPI_MCA_ess_base_jobid",),  # Open MPI 4
    ("PMIX_NAMESPACE",),  # Open MPI 5
)
"""Variables that distinguish one run of a launcher from others on the same hosts."""
_RETRY_S = 0.1


def rendezvous_address(
    address: str | None, port: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, int]:
    """Return host and port of the key-value store through which the processes of a replay communicate.

    By default the host is torchrun's, else the first node of Slurm's step, else this host; the port is next to
    torchrun's, else derived from the launcher's run id.

    Raises:
        EtloomError: The host cannot be resolved.
    """
    host = address or environment.get("MASTER_ADDR") or _first_node(environment) or "127.0.0.1"
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        # torch would retry for two minutes.
        raise InvalidValue(
            f"cannot resolve host {host!r}: {error.strerror}",
            remedy="specify one that all processes reach (--master-addr)",
            option="master_addr" if address else None,
        ) from error
    return host, port or _port_next_to(environment.get("MASTER_PORT", "")) or _run_port(environment)


def _port_next_to(used: str) -> int | None:
    if not re.fullmatch(r"\d{1,5}", used, re.ASCII) or not 0 < int(used) < 1 << 16:
        return None
    return int(used) + 1 if int(used) + 1 < 1 << 16 else int(used) - 1


def _run_port(environment: Mapping[str, str]) -> int:
    """Return a port derived from the launcher's run id, so that runs on the same host use different ports."""
    for names in _RUN_ID_VARIABLES:
        if all(name in environment for name in names):
            run_id = ".".join(environment[name] for name in names)
            return FIRST_PORT + zlib.crc32(run_id.encode()) % _PORT_COUNT
    return FIRST_PORT


def _first_node(environment: Mapping[str, str]) -> str | None:
    """Return the first node in Slurm's node list, such as node07 of node[07-12],other; None for a single node."""
    # The step that Open MPI starts consists of its helpers on the other nodes.
    scope = "JOB" if "OMPI_COMM_WORLD_RANK" in environment else "STEP"
    if environment.get(f"SLURM_{scope}_NUM_NODES", "1") == "1":
        return None
    nodes = environment.get(f"SLURM_{scope}_NODELIST", "")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0] or None


def connect_store(process: Process, address: str, port: int, timeout_s: float) -> Any:
    """Connect to the key-value store of all processes, which rank 0 hosts.

    Raises:
        EtloomError: The store cannot be reached.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    remedy = "specify a host that all processes reach and a free port there (--master-addr, --master-port)"
    if process.rank and not _is_listening(address, port, timeout_s):
        raise EtloomError(
            f"rank {process.rank} could not reach rank 0 at {address}:{port} within {timeout_s:g} s",
            remedy=remedy,
        )
    try:
        # torchrun has a store of its own on its port; this one belongs to the replay.
        return TCPStore(
            address,
            port,
            process.world_size,
            process.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=True,
        )
    except (RuntimeError, ValueError) as error:
        raise EtloomError(
            f"the {process.world_size} processes could not connect at {address}:{port}: {str(error).splitlines()[0]}",
            remedy=remedy,
        ) from error


def _is_listening(address: str, port: int, seconds: float) -> bool:
    """Return whether a server at ``address`` and ``port`` accepts a connection within ``seconds``.

    torch itself would wait twice as long, and print pages of messages.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError:
            time.sleep(_RETRY_S)
        else:
            return True
    return False


# Ends all processes of a replay when a process stops sending heartbeats or reports an error.

STORE_LOST = "rank 0, which hosts the store, is gone"
STARTING, PLANNING = "starting", "the plan"
HEARTBEAT_S = 1.0
SILENCE_LIMIT_S = 6.0
"""A process without heartbeats for so long is considered gone."""
SUSPECT_LIMIT_S = 3.0
"""The same, after a connection was lost."""


def clock_domain() -> str:
    """Return an identifier that is equal on processes sharing a monotonic clock: the host's boot id, else its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Watchdog:
    """A thread that sends heartbeats, and ends this process when another process stops sending them or fails.

    A connection to the store serves one request at a time, and the process may wait for a key for long; so the watchdog
    has a connection of its own.

    Attributes:
        describe: Returns what this process is doing; sent with each heartbeat.

    Args:
        end: Called with the reason when another process has ended; does not return.
    """

    def __init__(self, store: Any, process: Process, end: Callable[[str], None]) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.set_activity(STARTING)
        self._process, self._end = process, end
        self._store = TCPStore(store.host, store.port, process.world_size, False, wait_for_workers=False)
        self._stopped = threading.Event()
        self._reason: str | None = None
        self._start_watching()
        self._thread = threading.Thread(target=self._run, name="etloom-watch", daemon=True)

    def _start_watching(self) -> None:
        others = [rank for rank in range(self._process.world_size) if rank != self._process.rank]
        # If each of a thousand processes watched all others, one store would get a million requests per heartbeat.
        self._watched = others if self._process.rank == 0 else [0]
        self._last_beats = {rank: ("", time.monotonic()) for rank in others}

    def set_activity(self, activity: str) -> None:
        """Set the description of this process's current activity, which is sent with each heartbeat."""
        self.describe: Callable[[], str] = lambda: activity

    def find_lost(self, seconds: float) -> str | None:
        """Wait up to ``seconds`` for a sign that another process is lost or failed; return the reason, or None."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                reason = self._find_reason(SUSPECT_LIMIT_S, list(self._last_beats))
            except RuntimeError:
                reason = STORE_LOST
            if reason or time.monotonic() > deadline:
                self._reason = reason
                return reason
            time.sleep(HEARTBEAT_S / 4)

    def describe_others(self) -> str:
        """Return the last reported activity of the other processes."""
        beats = sorted((rank, beat) for rank, (beat, _) in self._last_beats.items())
        return "; ".join(f"rank {rank} is at {_parse_activity(beat)}" for rank, beat in beats[:8])

    def __enter__(self) -> Watchdog:
        self._send_beat(0)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(
            RuntimeError
        ):  # the store is gone, and with it all who could read the reason
            if error is not None:
                # The first reason counts, even if it is passed on by a rank that ends because of it.
                prefix, message = f"rank {self._process.rank}: ", str(error) or type(error).__name__
                reason = self._reason or prefix + message.removeprefix(prefix)
                self._store.compare_set("gave_up", "", reason)
            self._store.set(f"beat/{self._process.rank}", "done")
            if self._process.rank == 0:
                # The store ends with this process: the others first report that they are done, or read why not.
                self._wait_for_others(2 * HEARTBEAT_S if error is not None else SILENCE_LIMIT_S)

    def _wait_for_others(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        keys = [f"beat/{rank}" for rank in range(self._process.world_size)]
        while time.monotonic() < deadline and not (
            self._store.check(keys) and all(self._store.get(key) == b"done" for key in keys)
        ):
            time.sleep(HEARTBEAT_S / 20)

    def _send_beat(self, number: int) -> None:
        self._store.set(f"beat/{self._process.rank}", f"{number} {self.describe()}")

    def _run(self) -> None:
        number = 0
        while not self._stopped.wait(HEARTBEAT_S):
            number += 1
            try:
                self._send_beat(number)
                reason = self._find_reason()
            except RuntimeError:
                reason = STORE_LOST
            if reason and not self._stopped.is_set():
                if reason != STORE_LOST:
                    self._pass_on(reason)
                self._end(f"{reason}; rank {self._process.rank} was at {self.describe()}")

    def _pass_on(self, reason: str) -> None:
        """Publish the failure reason to all processes before this process ends; with rank 0, the store ends too."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("gave_up", "", reason)
        if self._process.rank == 0:
            time.sleep(1.5 * HEARTBEAT_S)

    def _find_reason(
        self, limit_s: float = SILENCE_LIMIT_S, ranks: Sequence[int] | None = None
    ) -> str | None:
        """Return why this process has to end (another process failed or is lost); None if it does not."""
        if self._store.check(["gave_up"]):
            reason = str(self._store.get("gave_up").decode())
            return None if reason.startswith(f"rank {self._process.rank}:") else reason
        now = time.monotonic()
        for rank, beat in self._read_beats(self._watched if ranks is None else ranks):
            last_beat, since = self._last_beats[rank]
            self._last_beats[rank] = (beat, since if beat == last_beat else now)
            # Reading large traces may hold the interpreter lock, and with it the heartbeat, for long. The loss of
            # rank 0 also shows as the loss of the store.
            if rank == 0 and _parse_activity(beat) in (STARTING, PLANNING):
                continue
            if beat != "done" and now - self._last_beats[rank][1] > limit_s:
                return f"rank {rank} is gone; it was at {_parse_activity(beat)}"
        return None

    def _read_beats(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """Return (rank, text of its last heartbeat) for each rank, with "" if it sent none yet."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        beats = dict(zip(keys, self._store.multi_get([*keys.values()]), strict=True)) if keys else {}
        return [(rank, beats.get(rank, b"").decode()) for rank in ranks]


def _parse_activity(beat: str) -> str:
    return beat.partition(" ")[2] or ("the end" if beat == "done" else "its start")
