"""What a process of the job saw of its steps, left in the run's hidden folder for the launcher.

Where nothing was recorded the launcher says why: see reasons.py.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from .. import run_folder
from ..atomic_file import write_atomically

_FILE_PREFIX = "seen-"
_MAX_NAMES = 1000


class ProcessStatus:
    """The facts of this process; `leave` writes them down.

    began: whether steps are counted; without, only `names` and `ended` are there. rank: as far as known. optimizer: the
    class of the first one made. steps: so many ended. asked: the window agreed on. missed: why windows were not
    recorded. sealed: one was. left_out: by --ranks. names: record_functions, how often entered. ended: the process
    came to its end in order. raised: the class of the exception that ended it.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = Path(scratch)
        self.facts: dict[str, Any] = {}
        self.names: Counter[str] = Counter()
        self._chance = os.urandom(6).hex()
        self._lock = threading.Lock()

    def forked(self) -> None:
        """In a child of fork, whose parent may have held the lock."""
        self._lock = threading.Lock()

    def enters(self, name: str) -> None:
        """A record_function; of a job that makes up new names for ever the first thousand are counted."""
        if name in self.names or len(self.names) < _MAX_NAMES:
            self.names[name] += 1

    def leave(self) -> bool:
        """False where the folder is not there, as on a host that does not share it."""
        # By process: a child of fork has facts of its own. And by chance: in containers each rank may be process 1.
        own = self._scratch / f"{_FILE_PREFIX}{socket.gethostname()}-{os.getpid()}-{self._chance}"
        with self._lock:  # what a thread of ours and the job's write at once stands there in its order
            if self.names:
                self.facts["names"] = self.names.most_common(3)
            try:
                write_atomically(own, json.dumps(self.facts.copy()), self._scratch)
            except (OSError, TypeError, ValueError):
                return False
        return True


def read_statuses(scratch: Path) -> list[dict[str, Any]]:
    """The facts of all processes that imported torch.optim, by rank; their files are removed."""
    found = []
    for path in scratch.glob(f"{_FILE_PREFIX}*"):
        host, pid, _ = path.name.removeprefix(_FILE_PREFIX).rsplit("-", 2)
        found.append((run_folder.read_json(path) or {}) | {"host": host, "pid": int(pid)})
        path.unlink()
    return sorted(found, key=lambda facts: facts.get("rank") or 0)
