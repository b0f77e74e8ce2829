"""Ends all processes of a replay when a process stops sending heartbeats or reports an error."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etloom.replayer.launch_environment import Process

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
