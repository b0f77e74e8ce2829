"""Work in a process of its own that may die of what it runs: it is started again without that.

Kernels of torch do not look at all of their arguments; what a trace makes up, or a stranger wrote, can end the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from etloom.core.errors import EtloomError

MAX_CRASHES = 50
OPERATOR_TIMEOUT_S = 60.0
"""An operator that takes longer is left out."""
_POLL_INTERVAL_S = 0.25
_NODE_FIELD_WIDTH = 20
_CHANNEL_VARIABLE = "ETLOOM_REPLAY_APART"
_PARENT_PID_VARIABLE = "ETLOOM_REPLAY_APART_OF"
_PR_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux
_REMEDY = "less memory (--max-memory), or --device meta"
# Not the user's folder: python -m would import what lies in it, and -P is not in Python 3.10.
_BOOTSTRAP = "import sys; sys.path[:] = filter(None, sys.path); from etloom.replayer.compute import isolation; isolation.run_child()"


def run_isolated(command: Sequence[str], quiet: bool = False) -> tuple[int, dict[int, str]]:
    """Run ``python -m`` and the command until it ends by itself; its exit status, and the nodes that it had to leave
    out with the reason.

    Each time a signal ends it, the node that it `told` last is left out from then on; so is one that takes longer than
    LIMIT_S. It ends with this process; where the user interrupts, it may show what it has, until the user interrupts
    again. quiet: what it writes is thrown away. Raises EtloomError where it told none, or that often that it is no use,
    and where it was killed from outside, as the system does for want of memory.
    """
    left_out: dict[int, str] = {}
    with _sigterm_as_exception(), tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        while True:
            at = Path(folder, "at")
            at.unlink(missing_ok=True)
            Path(folder, "left_out").write_text(json.dumps(left_out))
            started = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *command],
                env={
                    **os.environ,
                    _CHANNEL_VARIABLE: folder,
                    _PARENT_PID_VARIABLE: str(os.getpid()),
                    "PYTHONUNBUFFERED": "1",
                },
                stdout=subprocess.DEVNULL if quiet else None,
                stderr=subprocess.DEVNULL if quiet else None,
            )
            try:
                status = _wait_for_exit(started, at)
            except KeyboardInterrupt:
                if quiet:
                    raise
                if os.name == "posix":  # nobody but a terminal interrupts both
                    started.send_signal(signal.SIGINT)
                status = started.wait()
            finally:
                started.kill()
                started.wait()
            if status is not None and status >= 0:
                return status, left_out
            if status == -signal.SIGKILL:
                raise EtloomError("the replay was killed, most likely for want of memory", remedy=_REMEDY)
            name = (
                f"an operator of more than {OPERATOR_TIMEOUT_S:g} s"
                if status is None
                else signal.Signals(-status).name
            )
            node = next(iter(_read_progress(at)), "")
            if not node or int(node) in left_out or len(left_out) == MAX_CRASHES:
                raise EtloomError(f"the replay was ended by {name}", remedy=_REMEDY)
            left_out[int(node)] = (
                f"it did not end within {OPERATOR_TIMEOUT_S:g} s"
                if status is None
                else f"it ended the process: {name}"
            )


def _wait_for_exit(started: subprocess.Popen[bytes], at: Path) -> int | None:
    """The exit status of the process; None where it stays longer than LIMIT_S with one operator."""
    before: int | None = None
    waited = 0.0
    while True:
        try:
            return started.wait(_POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            # Not by the clock, which goes on while both processes are stopped.
            waited += _POLL_INTERVAL_S
        # Once all were tried they are repeated, and nobody tells how far that is.
        now = at.stat().st_mtime_ns if len(_read_progress(at)) == 1 else None
        if now is None or now != before:
            before, waited = now, 0.0
        elif waited > OPERATOR_TIMEOUT_S:
            return None


def _read_progress(at: Path) -> list[str]:
    """The last node, and a word more when all were tried."""
    return at.read_text().split() if at.exists() else []


@contextlib.contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """SIGTERM, too, is an exception here, unless somebody else handles it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_child() -> None:
    """What the process does first: it binds its life to its parent's, where the system can, and becomes the command.

    It is interrupted once: a terminal interrupts it and its parent, which then does so as well.
    """

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, once)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ[_PARENT_PID_VARIABLE]):  # it was gone before
            raise SystemExit(1)
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def connect_to_parent() -> tuple[Callable[[int | None], None], Mapping[int, str]]:
    """In the process: what to call with a node before it is tried and with None when all were, and the nodes to leave
    out with the reason."""
    folder = os.environ.get(_CHANNEL_VARIABLE)
    if folder is None:
        return lambda node: None, {}
    told = os.open(Path(folder, "at"), os.O_CREAT | os.O_WRONLY, 0o600)
    left_out = json.loads(Path(folder, "left_out").read_text())
    return lambda node: _write_progress(told, node), {int(node): why for node, why in left_out.items()}


def _write_progress(told: int, node: int | None) -> None:
    if node is None:
        os.pwrite(told, b"tried", _NODE_FIELD_WIDTH)
    else:
        os.pwrite(told, f"{node:<{_NODE_FIELD_WIDTH}}".encode(), 0)
