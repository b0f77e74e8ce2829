"""What ranks agree on through files in the run's folder: a window that somebody asks for, the begin of time.

Windows on demand: `trigger` asks, and all ranks open one in the same step.

The asker leaves a file in the run's folder. Rank 0 sees it as a step ends and writes into another one in which step
the window opens, some steps ahead, so that every rank has read it by then. A rank that had not says so and records
nothing: on a shared folder that is slow to show new files.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from .. import run_folder
from ..atomic_file import write_atomically
from ..rank_environment import current_rank

REQUEST_FILE = ".etloom-asked"
_WINDOW_FILE = ".etloom-window.json"
_START_FILE = ".etloom-zero"


def trigger(out: str | os.PathLike[str], patience_s: float = 5.0) -> bool:
    """Ask the job that records into the folder `out` to open its window.

    Returns whether it took note within so many seconds: it does so at the end of its next step, and later too. Raises
    CollectError without such a folder.
    """
    asked = Path(out) / REQUEST_FILE
    try:
        request_window(Path(out))
    except OSError as error:
        from etloom.core.errors import CollectError

        raise CollectError(
            f"no run waits here: {error.strerror}",
            where=out,
            remedy="name the folder of a running --on-demand",
        ) from error
    until = time.monotonic() + patience_s
    while asked.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return not asked.exists()


def request_window(out: Path) -> None:
    """Leave the question; a link of that name is not followed. Raises OSError."""
    question = os.open(out / REQUEST_FILE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    os.utime(question)  # not to be taken for one that was left here before
    os.close(question)


def clear_requests(out: Path) -> bool:
    """Remove what a run left; whether that was a question that nobody took note of."""
    asked = (out / REQUEST_FILE).exists()
    for name in (REQUEST_FILE, _WINDOW_FILE, _START_FILE):
        (out / name).unlink(missing_ok=True)
    return asked


def agree_on_start_ns(out: Path) -> int:
    """When the time began that steps by time are counted in: of the first rank to ask, for all of them."""
    own = out / f"{_START_FILE}.{os.urandom(6).hex()}"
    write_atomically(own, str(time.time_ns()), out)
    try:
        with suppress(FileExistsError):
            (out / _START_FILE).hardlink_to(own)
        return int((out / _START_FILE).read_text())
    finally:
        own.unlink(missing_ok=True)


class WindowRequests:
    """What a rank knows of the windows that were asked for."""

    def __init__(self, out: Path, *, anew: bool = True) -> None:
        self._asked, self._agreed = out / REQUEST_FILE, out / _WINDOW_FILE
        self._seen: tuple[int, int] | None = None
        # `anew`: a launcher has removed what an earlier job left; else the question that is there now is that job's.
        self._before = None if anew else _file_identity(self._asked)

    def agreed(self, count: int, steps: int, ahead: int) -> tuple[int, int] | None:
        """The next window [first, last) as of the end of step `count` - 1; None while nobody has asked.

        ahead: steps from the one in which rank 0 sees the question to the window.
        """
        if current_rank()[0] == 0 and self._asked.exists() and self.withdraw():
            self._agree({"first": count + ahead, "last": count + ahead + steps})
        stamp = _file_identity(self._agreed)
        if stamp is None or stamp == self._seen:
            return None
        self._seen = stamp
        found = run_folder.read_json(self._agreed)
        return None if found is None else (int(found["first"]), int(found["last"]))

    def withdraw(self) -> bool:
        """Remove the question; whether somebody asked it of this job."""
        stamp = _file_identity(self._asked)
        self._asked.unlink(missing_ok=True)
        return stamp is not None and stamp != self._before

    def _agree(self, window: dict[str, int]) -> None:
        scratch = self._agreed.with_name(f"{_WINDOW_FILE}.{os.getpid()}.{os.urandom(6).hex()}")
        scratch.mkdir()
        try:
            run_folder.write_json(self._agreed, window, scratch)
        finally:
            scratch.rmdir()


def _file_identity(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns
