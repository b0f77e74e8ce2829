"""Functions that worker processes of the tests call; each task is the path of a file or folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def note_process(text: str) -> None:
    """Write the id of the process to the file, and something to stdout."""
    print("printed by a library")
    Path(text.strip()).write_text(str(os.getpid()))


def fail_on_bad(text: str) -> None:
    """Like `note_process`; "bad" in the name raises, "killed" ends the process."""
    if "bad" in text:
        raise ValueError(text)
    if "killed" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    note_process(text)
