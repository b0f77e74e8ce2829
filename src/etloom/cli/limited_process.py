"""Runs functions about a run in a child process that is killed at a limit of time or memory.

Neither polars nor a simulation can be interrupted within a process, and a query of 60 characters may need any memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from etloom.cli.error_handling import print_warnings
from etloom.core.errors import EtloomError, LimitError

if TYPE_CHECKING:
    from etloom.core.trace import Job

# python -m would import modules from the user's current folder, and Python 3.10 has no -P.
_BOOTSTRAP = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from etloom.cli import limited_process; limited_process.serve(int(sys.argv[1]))"
)
_WAIT_S = 60.0
"""Time that a call waits for the end of earlier ones."""


class LimitedProcess:
    """A child process that opens a run on the first call, and after one that had to be killed.

    Args:
        open_run: opens the run, without limits of its own; it can be pickled.
        memory: bytes that a call may use beyond the opened run (of the address space, on POSIX); None: any.
    """

    def __init__(self, open_run: Callable[[], Job], memory: int | None) -> None:
        self._open_run, self._memory = open_run, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: BinaryIO | None = None
        self._is_busy = threading.Lock()

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float | None,
        topic: str,
        memory: int | None = None,
    ) -> Any:
        """Return ``function(job, *arguments)``, computed in the child process.

        Args:
            function: a function of a module of etloom.
            arguments: its arguments, which can be pickled.
            seconds: time that it may take, without opening the run; None: any.
            topic: "query" or the like, for messages.
            memory: another limit than that of the process.

        Raises:
            LimitError: it takes more time or memory, or an earlier call does not end.
            EtloomError: the run cannot be opened, or the function raised it.
        """
        memory = self._memory if memory is None else memory
        if not self._is_busy.acquire(timeout=-1 if seconds is None else max(seconds, _WAIT_S)):
            raise LimitError("an earlier question still runs", remedy="ask again later")
        try:
            has_failed, result = self._ask((function, arguments, seconds, memory))
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._explain_end(topic, seconds, memory) from None
        except BaseException:  # Ctrl-C
            self.close()
            raise
        finally:
            self._is_busy.release()
        if has_failed:
            raise result
        return result

    def close(self) -> None:
        """End the process, in any state."""
        if self._process is not None and self._answers is not None:
            self._process.kill()
            self._process.wait()
            self._answers.close()
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            self._process = self._answers = None

    def _ask(self, request: tuple[Any, ...]) -> tuple[bool, Any]:
        if self._process is None:
            self._start()
        process, answers = self._process, self._answers
        assert process is not None and process.stdin is not None and answers is not None
        pickle.dump(request, process.stdin)
        process.stdin.flush()
        has_failed, result = pickle.load(answers)  # noqa: S301 - of our own process
        return has_failed, result

    def _start(self) -> None:
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[write],
        )
        os.close(write)
        self._answers = os.fdopen(read, "rb")
        assert self._process.stdin is not None
        pickle.dump(self._open_run, self._process.stdin)

    def _explain_end(self, topic: str, seconds: float | None, memory: int | None) -> EtloomError:
        """Return the error of a process that has ended, of which nothing remains."""
        status = None if self._process is None else self._process.wait()
        self.close()
        if status == -signal.SIGALRM:
            return LimitError(
                f"the {topic} takes longer than {seconds:g} s",
                remedy=f"narrow the {topic}, or allow more time",
            )
        if memory is None:
            return EtloomError(f"the process of the {topic} was ended with status {status}")
        return _memory_error(topic, memory)


def _memory_error(topic: str, memory: int) -> LimitError:
    return LimitError(
        f"the {topic} needs more than {memory / 1e9:,.1f} GB of memory",
        remedy=f"narrow the {topic}, or allow more memory",
    )


def serve(answers: int) -> None:
    """In the child process: open the run and answer calls until stdin ends; answers go to a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports Ctrl-C
    job: Job | None = None
    with os.fdopen(answers, "wb") as file:
        open_run = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own process
        while True:
            try:
                function, arguments, seconds, memory = pickle.load(sys.stdin.buffer)  # noqa: S301 - as above
            except EOFError:
                return
            try:
                if job is None:
                    with print_warnings():
                        job = open_run()
                with _limits(seconds, memory):
                    answer = pickle.dumps((False, function(job, *arguments)))
            except MemoryError:
                os.abort()  # as polars does
            except BaseException as error:  # also a panic of polars
                answer = _pickle_error(error)
            file.write(answer)
            file.flush()


def _pickle_error(error: BaseException) -> bytes:
    with contextlib.suppress(Exception):
        answer = pickle.dumps((True, error))
        pickle.loads(answer)  # noqa: S301 - not every exception can be restored
        return answer
    return pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))


@contextlib.contextmanager
def _limits(seconds: float | None, memory: int | None) -> Any:
    """Let the system end the process if the block takes more time or memory, which prints nothing."""
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null_file:  # noqa: PTH123 - what is printed by a process that ends
        os.dup2(null_file.fileno(), 2)
    try:
        if memory is not None:
            _limit_memory(memory)
        signal.setitimer(signal.ITIMER_REAL, seconds or 0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if memory is not None:
            _limit_memory(None)
        os.dup2(stderr, 2)
        os.close(stderr)


def _limit_memory(memory: int | None) -> None:
    """Limit the address space to what is in use and a number of bytes; None: as the process was started."""
    import resource

    import polars as pl

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = hard
    if memory is not None:
        pl.LazyFrame({"row": [0]}).collect(engine="streaming")  # stacks of the threads are in use from now on
        with contextlib.suppress(OSError):  # on Linux; else all of the process counts
            memory += int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
