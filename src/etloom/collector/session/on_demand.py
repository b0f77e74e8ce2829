"""Recording on demand: files in the run's folder through which all ranks agree on the same steps.

`request_recording` creates a request file. When rank 0 finishes a step it sees the file and writes another one with
the step in which the window opens, some steps ahead, so that every rank has read it by then. A rank that reads it too
late, on a shared folder that is slow to show new files, reports that and records nothing.

Ranks whose steps are time intervals agree on the origin of time in the same way (`agree_on_start_ns`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ..atomic_file import write_atomically
from ..rank_environment import current_rank
from ..run_folder import read_json, write_json

REQUEST_FILE = ".etloom-request"
_WINDOW_FILE = ".etloom-window.json"
_START_FILE = ".etloom-start"
_POLL_S = 0.02


def request_recording(out: str | os.PathLike[str], timeout_s: float = 5.0) -> bool:
    """Request that the job that was started with `on_demand` and the folder `out` records a window of steps.

    Args:
        out: The folder of the run.
        timeout_s: How long to wait, in seconds, until a rank has picked up the request.

    Returns:
        Whether a rank has picked up the request. If not, the job still does so at the end of its next step.

    Raises:
        CollectError: There is no such folder, or it cannot be written.
    """
    folder = Path(os.path.expanduser(out))  # noqa: PTH111
    request = folder / REQUEST_FILE
    try:
        request_window(folder)
    except OSError as error:
        from etloom.core.errors import CollectError

        raise CollectError(
            f"cannot request a recording: {error.strerror}",
            where=out,
            remedy="name the folder of a running job with --on-demand",
        ) from error
    deadline = time.monotonic() + timeout_s
    while request.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return not request.exists()


def request_window(out: Path) -> None:
    """Create the file that requests a recording in the folder `out`; does not follow a link. Raises OSError."""
    descriptor = os.open(out / REQUEST_FILE, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    os.utime(descriptor)  # distinguishes it from a request that was there before
    os.close(descriptor)


def clear_requests(out: Path) -> bool:
    """Delete the files of recording requests in the folder `out`; return whether a request was still unanswered."""
    requested = (out / REQUEST_FILE).exists()
    for name in (REQUEST_FILE, _WINDOW_FILE, _START_FILE):
        (out / name).unlink(missing_ok=True)
    return requested


def agree_on_start_ns(out: Path) -> int:
    """Return the time origin (ns since the Unix epoch) of steps by time: the time of the first call on any rank."""
    proposal = out / f"{_START_FILE}.{os.urandom(6).hex()}"
    write_atomically(proposal, str(time.time_ns()), out)
    try:
        with suppress(FileExistsError):
            (out / _START_FILE).hardlink_to(proposal)
        return int((out / _START_FILE).read_text())
    finally:
        proposal.unlink(missing_ok=True)


class WindowRequests:
    """Reads the recording requests of a run on one rank, and determines the steps of the requested windows.

    Args:
        out: The folder of the run.
        is_cleared: A launcher has removed the files of an earlier job. If not, a request that exists now belongs to
            that job and is ignored.
    """

    def __init__(self, out: Path, *, is_cleared: bool = True) -> None:
        self._request, self._window_file = out / REQUEST_FILE, out / _WINDOW_FILE
        self._last_window: tuple[int, int] | None = None
        self._ignored = None if is_cleared else _file_identity(self._request)

    def next_window(self, count: int, steps: int, ahead: int) -> tuple[int, int] | None:
        """Return the steps [first, last) of a newly requested recording window, or None without a new request.

        Args:
            count: Number of steps that have ended.
            steps: Steps of a window.
            ahead: Steps from the one in which rank 0 sees the request to the window.
        """
        if current_rank()[0] == 0 and self._request.exists() and self.withdraw():
            self._announce({"first": count + ahead, "last": count + ahead + steps})
        identity = _file_identity(self._window_file)
        if identity is None or identity == self._last_window:
            return None
        self._last_window = identity
        window = read_json(self._window_file)
        return None if window is None else (int(window["first"]), int(window["last"]))

    def withdraw(self) -> bool:
        """Remove the file that requests a recording; return whether the request was meant for the running job."""
        identity = _file_identity(self._request)
        self._request.unlink(missing_ok=True)
        return identity is not None and identity != self._ignored

    def _announce(self, window: dict[str, int]) -> None:
        scratch = self._window_file.with_name(f"{_WINDOW_FILE}.{os.getpid()}.{os.urandom(6).hex()}")
        scratch.mkdir()
        try:
            write_json(self._window_file, window, scratch)
        finally:
            scratch.rmdir()


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a file, or None if it does not exist."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns
