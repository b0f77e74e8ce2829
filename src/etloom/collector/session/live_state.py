"""State of a running rank for `etloom watch`: its last collectives, steps and main thread, in a file every half second.

The file is a Flight Recorder dump with the member `process`. A thread writes it, so a process that is stopped, or whose
GIL is held, leaves an old file, which distinguishes it from a rank that waits.

Launchers, DataLoader workers and compilers import torch too, often with the environment of a rank. So a process writes
only when it has joined a process group or ended a step.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ..atomic_file import write_atomically
from ..fork_hold import output_lock
from ..rank_environment import current_rank, is_distributed
from .profilers import read_flight_recorder

WATCH_FOLDER = ".watch"
INTERVAL_S = 0.5
_MAX_INTERVAL_S = 1.25
_MAX_CPU_SHARE = 0.004
"""Share of a core up to which the writing thread runs: a state that costs more is written less often."""
_MAX_FRAMES = 40
_MAX_STEPS = 32
_MAX_LAST_WRITE_S = 5.0
_EMPTY_DUMP = '{"entries": [], "pg_config": {}, "pg_status": {}, "version": ""}'
_ESTABLISHED = "01"


def start_live_state(out: Path, optimizer_module: Any) -> None:
    """Start a thread that writes the state of this process to a file about twice a second, for `etloom watch`.

    Args:
        out: the folder of the run.
        optimizer_module: torch.optim.optimizer, whose steps are counted.
    """
    state = LiveState(out / WATCH_FOLDER)
    optimizer_module.register_optimizer_step_post_hook(state.count_step)
    atexit.register(state.finish)
    threading.Thread(target=state.run, name="etloom-watch", daemon=True).start()


class LiveState:
    """Collects the state of this process and writes it to a file, for `etloom watch`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = os.getpid()
        self._main_thread = threading.main_thread().ident
        self._steps = 0
        self._step_ends_ns: deque[int] = deque(maxlen=_MAX_STEPS)
        self._optimizer: Callable[[], Any] = lambda: None
        self._rank: tuple[int, int] | None = None  # kept when the job leaves its process group
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._status = ""
        self._interval_s = INTERVAL_S

    def count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count a step of a single optimizer: the first that calls step(), or the next after that object is freed."""
        counted_optimizer = self._optimizer()
        if counted_optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        elif counted_optimizer is not optimizer:
            return
        self._steps += 1
        self._step_ends_ns.append(time.time_ns())

    def run(self) -> None:
        """Write the state at intervals until the process ends; errors are ignored."""
        while not self._ended.wait(self._interval_s):
            begin = time.thread_time()
            with suppress(Exception), self._writing:
                self.write()
            self._interval_s = choose_interval(time.thread_time() - begin)

    def finish(self) -> None:
        """Write the final state file, including the exception that ends the process, if any."""
        if os.getpid() != self._pid:  # a forked child of the job
            return
        self._ended.set()
        error = getattr(sys, "last_value", None)
        text = None if error is None else f"{type(error).__name__}: {error}"[:300]
        self._writing.acquire(timeout=_MAX_LAST_WRITE_S)  # the thread must not replace the last state
        with suppress(Exception):
            self.write(finished=True, error=text)

    def write(self, **ending: Any) -> None:
        """Write the state file of this rank, once the process has joined a group or ended a step. Raises OSError."""
        if is_distributed() or (self._rank is None and self._steps):
            self._rank = current_rank()
        if self._rank is None:
            return
        rank, world_size = self._rank
        dump = _dump_calls()
        process = {
            "pid": self._pid,
            "host": socket.gethostname(),
            "written_ns": time.time_ns(),
            "interval_s": self._interval_s,
            "world_size": world_size,
            "steps": self._steps,
            "step_ends_ns": list(self._step_ends_ns),
            "frames": _list_frames(self._main_thread),
            **self._list_connections(dump),
            **ending,
        }
        self._folder.mkdir(exist_ok=True)
        text = f'{dump.rstrip().removesuffix("}")}, "rank": {rank}, "process": {json.dumps(process)}}}'
        with output_lock:
            write_atomically(self._folder / f"fr_trace_{rank}.json", text, self._folder)

    def _list_connections(self, dump: str) -> dict[str, list[str]]:
        """Return this process's TCP connections if no collective has advanced since the last state file; else empty."""
        status = dump[dump.rfind('"pg_status"') :]
        has_progress, self._status = status != self._status, status
        if has_progress or '"retired": false' not in dump.replace('"retired":false', '"retired": false'):
            return {}
        return list_connections()


def choose_interval(cpu_s: float) -> float:
    """Return the time in s until the next write of the state, from the CPU time in s of the last write."""
    return min(max(INTERVAL_S, cpu_s / _MAX_CPU_SHARE), _MAX_INTERVAL_S)


def list_connections() -> dict[str, list[str]]:
    """Return the local addresses of this process's TCP connections (Linux), and of peers that acknowledge no data."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    addresses, unacknowledged = [], []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/self/net", name).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] != _ESTABLISHED or words[9] not in inodes:
                    continue
                addresses.append(words[1])
                if int(words[6], 16) > 0:  # retransmissions of the oldest data
                    unacknowledged.append(words[2])
    return {"addresses": addresses, "unacknowledged": unacknowledged}


def _dump_calls() -> str:
    """Return the dump of torch's Flight Recorder as JSON; an empty dump if there is no Flight Recorder."""
    if "torch.distributed" not in sys.modules:
        return _EMPTY_DUMP
    try:
        dump = read_flight_recorder()
    except (ImportError, RuntimeError):
        return _EMPTY_DUMP
    return dump if dump is not None and '"entries"' in dump else _EMPTY_DUMP


def _list_frames(thread: int | None) -> list[str]:
    """Return the Python frames of a thread, innermost first, as name (file:line)."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    frames: list[str] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        frames.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return frames
