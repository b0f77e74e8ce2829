"""Windows that somebody asks for while the job runs: `trigger` asks, and all ranks open one in the same step.

The asker leaves a file in the run's folder. Rank 0 sees it as a step ends and writes into another one in which step
the window opens, some steps ahead, so that every rank has read it by then. A rank that had not says so and records
nothing: on a shared folder that is slow to show new files.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import files
from .ranks import current_rank

ASKED = ".etloom-asked"
_AGREED = ".etloom-window.json"


def trigger(out: str | os.PathLike[str]) -> None:
    """Ask the job that records into the folder `out` to open its window. Raises CollectError without one."""
    try:
        (Path(out) / ASKED).touch()
    except OSError as error:
        from etloom.errors import CollectError

        raise CollectError(
            f"no run waits here: {error.strerror}",
            where=out,
            remedy="name the folder of a running --on-demand",
        ) from error


def forget(out: Path) -> None:
    """Remove what an earlier run left."""
    for name in (ASKED, _AGREED):
        (out / name).unlink(missing_ok=True)


class Demand:
    """What a rank knows of the windows that were asked for."""

    def __init__(self, out: Path) -> None:
        self._asked, self._agreed = out / ASKED, out / _AGREED
        self._seen: tuple[int, int] | None = None

    def agreed(self, count: int, steps: int, ahead: int) -> tuple[int, int] | None:
        """The next window [first, last) as of the end of step `count` - 1; None while nobody has asked.

        ahead: steps from the one in which rank 0 sees the question to the window.
        """
        if current_rank()[0] == 0 and self._asked.exists():
            self._asked.unlink(missing_ok=True)
            self._agree({"first": count + ahead, "last": count + ahead + steps})
        try:
            state = self._agreed.stat()
        except OSError:
            return None
        stamp = (state.st_ino, state.st_mtime_ns)
        if stamp == self._seen:
            return None
        self._seen = stamp
        found = files.read_json(self._agreed)
        return None if found is None else (int(found["first"]), int(found["last"]))

    def _agree(self, window: dict[str, int]) -> None:
        scratch = self._agreed.with_name(f"{_AGREED}.{os.getpid()}")
        scratch.mkdir(exist_ok=True)
        files.write_json(self._agreed, window, scratch)
        scratch.rmdir()
