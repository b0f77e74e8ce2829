"""Status files of the job's processes: their steps and how they ended, stored in the run's hidden folder.

The launcher reads them to explain why nothing was recorded (diagnosis.py).
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

from ..atomic_file import write_atomically
from ..fork_hold import output_lock
from ..run_folder import read_json

_FILE_PREFIX = "status-"
_MAX_NAMES = 1000
_REPORTED_NAMES = 3


class ProcessStatus:
    """Facts about this process for the launcher, such as steps and how it ended; `write` stores them in a file.

    The keys of `facts`, all optional:
        began: Steps are counted. Without it only `names` and `ended` exist.
        rank: The rank, if known.
        optimizer: Class of the first optimizer.
        steps: Number of steps that ended.
        requested: The window on demand that was agreed on, [first, last).
        missed: Reasons of windows that were not recorded.
        recorded: A window was recorded.
        excluded: The option `ranks` excludes this rank.
        names: The most frequent record_functions, with their counts.
        ended: The process reached its end normally.
        raised: Class of the exception that ended it.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = Path(scratch)
        self.facts: dict[str, Any] = {}
        self.names: Counter[str] = Counter()
        self._random_id = os.urandom(6).hex()

    def count_name(self, name: str) -> None:
        """Count a use of the record_function `name`; only the first 1000 distinct names are counted to limit memory."""
        if name in self.names or len(self.names) < _MAX_NAMES:
            self.names[name] += 1

    def write(self) -> bool:
        """Write the status file; return False if the folder does not exist, as on a host that does not share it."""
        # The pid: a child of fork has its own status. The random id: in containers each rank may be process 1.
        path = self._scratch / f"{_FILE_PREFIX}{socket.gethostname()}-{os.getpid()}-{self._random_id}"
        with output_lock:  # also keeps the order of writes by the collector's thread and the job's
            if self.names:
                self.facts["names"] = self.names.most_common(_REPORTED_NAMES)
            try:
                write_atomically(path, json.dumps(self.facts.copy()), self._scratch)
            except (OSError, TypeError, ValueError):
                return False
        return True


def read_statuses(scratch: Path) -> list[dict[str, Any]]:
    """Read and delete the status files in `scratch`; return one status per process, sorted by rank."""
    statuses = []
    for path in scratch.glob(f"{_FILE_PREFIX}*"):
        host, pid, _ = path.name.removeprefix(_FILE_PREFIX).rsplit("-", 2)
        statuses.append((read_json(path) or {}) | {"host": host, "pid": int(pid)})
        path.unlink()
    return sorted(statuses, key=lambda status: status.get("rank") or 0)
