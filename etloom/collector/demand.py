"""A window that somebody asks for while the job runs: `trigger` asks, and all ranks open it in the same step.

The asker leaves a file in the run's folder. Rank 0 sees it as a step ends and writes into another one in which step
the window opens, some steps ahead, so that every rank has read it by then. A rank that had not says so and records
nothing: on a shared folder that is slow to show new files.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import files

_ASKED = ".etloom-asked"
_AGREED = ".etloom-window.json"
_AHEAD = 3  # steps from the one in which rank 0 saw the question to the window


def trigger(out: str | os.PathLike[str]) -> None:
    """Ask the job that records into the folder `out` to open its window. Raises CollectError without one."""
    try:
        (Path(out) / _ASKED).touch()
    except OSError as error:
        from etloom.errors import CollectError

        raise CollectError(
            f"no run waits here: {error.strerror}",
            where=out,
            remedy="name the folder of a running --on-demand",
        ) from error


def forget(out: Path) -> None:
    """Remove what an earlier run left."""
    for name in (_ASKED, _AGREED):
        (out / name).unlink(missing_ok=True)


def agreed(out: Path, count: int, steps: int) -> tuple[int, int] | None:
    """The window [first, last) as of the end of step `count` - 1; None while nobody has asked."""
    found = files.read_json(out / _AGREED)
    if found is None:
        if files.current_rank()[0] != 0 or not (out / _ASKED).exists():
            return None
        found = {"first": count + _AHEAD, "last": count + _AHEAD + steps}
        scratch = out / f"{_AGREED}.{os.getpid()}"
        scratch.mkdir(exist_ok=True)
        files.write_json(out / _AGREED, found, scratch)
        scratch.rmdir()
    return int(found["first"]), int(found["last"])
