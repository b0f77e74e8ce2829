"""Runs work in a child process; if an operator crashes it, restarts without that operator.

torch's kernels do not validate all of their arguments: synthetic values, or values that someone wrote into a trace, can
crash the process.
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
MAX_TIMEOUTS = 1
"""More timeouts end the replay: an untrusted trace may consist of operators that only take time."""
OPERATOR_TIMEOUT_S = 5.0
"""Default; an operator that takes longer is skipped."""
_POLL_INTERVAL_S = 0.25
_NODE_FIELD_WIDTH = 20
_CHANNEL_VARIABLE = "ETLOOM_REPLAY_CHANNEL"
_PARENT_PID_VARIABLE = "ETLOOM_REPLAY_PARENT"
_PR_SET_PDEATHSIG = 1
_REMEDY = "reduce the memory (--max-memory), or use --device meta"
_PART_REMEDY = "replay a part (--step, --subgraph), or use --device meta, which runs no kernels"
# python -m would import modules from the user's current folder, and Python 3.10 has no -P.
_BOOTSTRAP = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from etloom.replayer.compute import isolation; isolation.run_child()"
)


def run_isolated(
    command: Sequence[str], discard_output: bool = False, operator_timeout_s: float | None = None
) -> tuple[int, dict[int, str]]:
    """Run a Python module in a child process; after each crash, restart it without the node that crashed.

    Each time a signal ends it, the node that it reported last (`connect_to_parent`) is skipped from then on; so is one
    that takes longer than the timeout. The child ends with this process. If the user interrupts, it may still
    print its results, until the user interrupts again.

    Args:
        command: A module and its arguments.
        discard_output: Discard its output.
        operator_timeout_s: Seconds after which an operator is skipped; default: OPERATOR_TIMEOUT_S.

    Returns:
        Its exit status, and node -> reason for the nodes that it had to skip.

    Raises:
        EtloomError: It reported no node, crashed or timed out too often, or was killed from outside, as by the system
            when memory is exhausted.
    """
    skipped: dict[int, str] = {}
    timeout_s = OPERATOR_TIMEOUT_S if operator_timeout_s is None else operator_timeout_s
    timed_out = f"it did not end within {timeout_s:g} s"
    with _sigterm_as_exception(), tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        while True:
            channel = Path(folder, "node")
            channel.unlink(missing_ok=True)
            Path(folder, "skipped").write_text(json.dumps(skipped))
            status = _run_once(command, folder, channel, discard_output, timeout_s)
            if status is not None and status >= 0:
                return status, skipped
            if status == -signal.SIGKILL:
                raise EtloomError(
                    "the replay was killed, probably because memory was exhausted", remedy=_REMEDY
                )
            node = next(iter(_read_progress(channel)), "")
            if not node or int(node) in skipped:
                reason = timed_out if status is None else signal.Signals(-status).name
                raise EtloomError(f"the replay was ended by {reason}", remedy=_PART_REMEDY)
            skipped[int(node)] = (
                timed_out if status is None else f"it crashed the process: {signal.Signals(-status).name}"
            )
            if list(skipped.values()).count(timed_out) > MAX_TIMEOUTS:
                raise EtloomError(
                    f"operators {_list_nodes(skipped, timed_out)} did not end within {timeout_s:g} s each",
                    remedy=f"allow them more time (--operator-timeout), or {_PART_REMEDY}",
                )
            if len(skipped) > MAX_CRASHES:
                raise EtloomError(
                    f"more than {MAX_CRASHES} operators crashed the process", remedy=_PART_REMEDY
                )


def _list_nodes(skipped: Mapping[int, str], reason: str) -> str:
    return " and ".join(str(node) for node, text in skipped.items() if text == reason)


def _run_once(
    command: Sequence[str], folder: str, channel: Path, discard_output: bool, timeout_s: float
) -> int | None:
    """Run a single child process and return its exit status; None if an operator takes longer than ``timeout_s``."""
    environment = {_CHANNEL_VARIABLE: folder, _PARENT_PID_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, *command],
        env={
            "KINETO_LOG_LEVEL": "5",
            **os.environ,
            **environment,
        },  # its profiler prints when it starts and stops
        stdout=subprocess.DEVNULL if discard_output else None,
        stderr=subprocess.DEVNULL if discard_output else None,
    )
    try:
        return _wait_for_exit(child, channel, timeout_s)
    except KeyboardInterrupt:
        if discard_output:
            raise
        if os.name == "posix":  # only a terminal interrupts both processes
            child.send_signal(signal.SIGINT)
        return child.wait()
    finally:
        child.kill()
        child.wait()


def _wait_for_exit(child: subprocess.Popen[bytes], channel: Path, timeout_s: float) -> int | None:
    """Return the exit status of the child; None if one operator takes longer than the timeout."""
    last_change: int | None = None
    waited = 0.0
    while True:
        try:
            return child.wait(_POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            # Not measured by the clock, which goes on while both processes are stopped.
            waited += _POLL_INTERVAL_S
        # After all nodes were tried they are repeated, and no progress is reported.
        change = channel.stat().st_mtime_ns if len(_read_progress(channel)) == 1 else None
        if change is None or change != last_change:
            last_change, waited = change, 0.0
        elif waited > timeout_s:
            return None


def _read_progress(channel: Path) -> list[str]:
    """Return the words in the child's progress file: the node tried last and, after all were tried, a second word."""
    return channel.read_text().split() if channel.exists() else []


@contextlib.contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Context manager: raise SystemExit on SIGTERM, unless the program handles the signal itself."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_child() -> None:
    """In the child process: run the module named on the command line; on Linux, the child ends when its parent ends.

    It is interrupted once: a terminal interrupts both it and its parent, which then interrupts it again.
    """

    def interrupt_once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt_once)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ[_PARENT_PID_VARIABLE]):  # the parent has ended before the call
            raise SystemExit(1)
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def connect_to_parent() -> tuple[Callable[[int | None], None], Mapping[int, str]]:
    """In the child process: return a function that reports the node to run next, and the nodes to skip with reasons.

    Returns:
        A function to call with each node before it is tried, and with None after all were; and node -> reason for the
        nodes to skip.
    """
    folder = os.environ.get(_CHANNEL_VARIABLE)
    if folder is None:
        return lambda node: None, {}
    channel = os.open(Path(folder, "node"), os.O_CREAT | os.O_WRONLY, 0o600)
    skipped = json.loads(Path(folder, "skipped").read_text())
    return lambda node: _write_progress(channel, node), {
        int(node): reason for node, reason in skipped.items()
    }


def _write_progress(channel: int, node: int | None) -> None:
    if node is None:
        os.pwrite(channel, b"tried", _NODE_FIELD_WIDTH)
    else:
        os.pwrite(channel, f"{node:<{_NODE_FIELD_WIDTH}}".encode(), 0)
