"""The processes of a replay: who this one is, and the watch that ends all when one is gone.

torchrun, Open MPI, MPICH's Hydra and Slurm say in the environment which process this is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from etloom.core.errors import EtloomError

RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    # Not SLURM_NTASKS, which a batch script has as well, beside the rank 0, before any step runs.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Variables of rank, world size and rank on the host, by launcher."""

STORE_LOST = "rank 0, which keeps the store, is gone"
STARTING, PLANNING = "starting", "the plan"
HEARTBEAT_S = 1.0
SILENCE_LIMIT_S = 6.0
"""A process that has not been heard of for so long is gone."""
SUSPECT_LIMIT_S = 3.0
"""The same, where a connection has broken."""


@dataclass(frozen=True)
class Process:
    """Which process this is. local: on its host."""

    rank: int
    world: int
    local: int

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Process:
        """By the variables of the launcher; one process alone without any. Raises EtloomError for nonsense in them."""
        for rank, world, local in RANK_VARIABLES:
            if rank in environment and world in environment:
                with contextlib.suppress(ValueError):
                    own, size = int(environment[rank]), int(environment[world])
                    if 0 <= own < size:
                        # Slurm that starts processes as MPICH would (--mpi=pmi2) says this one thing in its own way.
                        return cls(
                            own, size, int(environment.get(local, environment.get("SLURM_LOCALID", own)))
                        )
                raise EtloomError(
                    f"{rank}={environment[rank]!r}, {world}={environment[world]!r} say no rank",
                    remedy="start with torchrun, mpirun or srun",
                )
        return cls(0, 1, 0)


def clock_domain() -> str:
    """What processes have in common whose monotonic clocks are one: this start of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Watchdog:
    """A thread that tells the others that this process lives, and ends it when another one is gone or gave up.

    ``at`` is told with the heart beat: what this process is doing. On the end of another process ``end`` is called with
    the reason; it does not return. Only one at a time may ask a connection to the store, so this one has its own: the
    process may wait for a key for long.
    """

    def __init__(self, store: Any, place: Process, end: Callable[[str], None]) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.tell(STARTING)
        self._place, self._end = place, end
        self._store = TCPStore(store.host, store.port, place.world, False, wait_for_workers=False)
        self._done = threading.Event()
        self._reason: str | None = None
        self._begin()
        self._thread = threading.Thread(target=self._run, name="etloom-watch", daemon=True)

    def _begin(self) -> None:
        others = [rank for rank in range(self._place.world) if rank != self._place.rank]
        # Each of a thousand that asked for each other would be a million requests a beat to one store.
        self._watched = others if self._place.rank == 0 else [0]
        self._seen = {rank: ("", time.monotonic()) for rank in others}

    def tell(self, doing: str) -> None:
        """Say what this process does from now on."""
        self.at: Callable[[], str] = lambda: doing

    def lost(self, seconds: float) -> str | None:
        """Which other process is gone or gave up, if that comes to light within so many seconds."""
        until = time.monotonic() + seconds
        while True:
            try:
                reason = self._gone(SUSPECT_LIMIT_S, list(self._seen))
            except RuntimeError:
                reason = STORE_LOST
            if reason or time.monotonic() > until:
                self._reason = reason
                return reason
            time.sleep(HEARTBEAT_S / 4)

    def standing(self) -> str:
        """Where the other processes were last."""
        told = sorted((rank, beat) for rank, (beat, _) in self._seen.items())
        return "; ".join(f"rank {rank} is at {_activity_of(beat)}" for rank, beat in told[:8])

    def __enter__(self) -> Watchdog:
        self._beat(0)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._done.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody is left to tell
            if error is not None:
                # The first reason is the one, also where it is told by a rank that ends because of it.
                own, told = f"rank {self._place.rank}: ", str(error) or type(error).__name__
                self._store.compare_set("gave_up", "", self._reason or own + told.removeprefix(own))
            self._store.set(f"beat/{self._place.rank}", "done")
            if self._place.rank == 0:
                # The store goes with this process: the others have to say that they are done, or to read why not.
                self._stay(2 * HEARTBEAT_S if error is not None else SILENCE_LIMIT_S)

    def _stay(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        keys = [f"beat/{rank}" for rank in range(self._place.world)]
        while time.monotonic() < until and not (
            self._store.check(keys) and all(self._store.get(key) == b"done" for key in keys)
        ):
            time.sleep(HEARTBEAT_S / 20)

    def _beat(self, number: int) -> None:
        self._store.set(f"beat/{self._place.rank}", f"{number} {self.at()}")

    def _run(self) -> None:
        number = 0
        while not self._done.wait(HEARTBEAT_S):
            number += 1
            try:
                self._beat(number)
                reason = self._gone()
            except RuntimeError:
                reason = STORE_LOST
            if reason and not self._done.is_set():
                if reason != STORE_LOST:
                    self._pass_on(reason)
                self._end(f"{reason}; rank {self._place.rank} was at {self.at()}")

    def _pass_on(self, reason: str) -> None:
        """Tell the others, before this process goes and with that of rank 0 the store."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("gave_up", "", reason)
        if self._place.rank == 0:
            time.sleep(1.5 * HEARTBEAT_S)

    def _gone(self, patience: float = SILENCE_LIMIT_S, of: Sequence[int] | None = None) -> str | None:
        if self._store.check(["gave_up"]):
            said = str(self._store.get("gave_up").decode())
            return None if said.startswith(f"rank {self._place.rank}:") else said
        now = time.monotonic()
        for rank, beat in self._beats(self._watched if of is None else of):
            before, since = self._seen[rank]
            self._seen[rank] = (beat, since if beat == before else now)
            # Reading large traces may hold the interpreter, and with it the heart beat, for long. That rank 0 is gone
            # the store tells as well, which goes with it.
            if rank == 0 and _activity_of(beat) in (STARTING, PLANNING):
                continue
            if beat != "done" and now - self._seen[rank][1] > patience:
                return f"rank {rank} is gone; it was at {_activity_of(beat)}"
        return None

    def _beats(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """What ranks told last, "" of one that did not yet."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        told = dict(zip(keys, self._store.multi_get([*keys.values()]), strict=True)) if keys else {}
        return [(rank, told.get(rank, b"").decode()) for rank in ranks]


def _activity_of(beat: str) -> str:
    return beat.partition(" ")[2] or ("the end" if beat == "done" else "its start")


def connect_store(place: Process, address: str, port: int, timeout_s: float) -> Any:
    """The key-value store of all processes, kept by rank 0. Raises EtloomError where it cannot be reached."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    remedy = "name a host that all reach and a free port (--master-addr, --master-port)"
    if place.rank and not _is_listening(address, port, timeout_s):
        raise EtloomError(
            f"rank {place.rank} did not meet rank 0 at {address}:{port} within {timeout_s:g} s", remedy=remedy
        )
    try:
        # torchrun keeps a store of its own on its port; the one here is the replay's.
        return TCPStore(
            address,
            port,
            place.world,
            place.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=True,
        )
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise EtloomError(
            f"the {place.world} processes did not meet at {address}:{port}: {first}",
            remedy=remedy,
        ) from error


def _is_listening(address: str, port: int, seconds: float) -> bool:
    """Whether somebody listens there before so many seconds are over. torch itself would wait twice as long, and tell
    of it in pages."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            socket.create_connection((address, port), timeout=max(0.1, until - time.monotonic())).close()
        except OSError:
            time.sleep(HEARTBEAT_S / 10)
        else:
            return True
    return False
