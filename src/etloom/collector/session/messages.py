"""Messages of a job's process: on stderr, in the records of its recording windows, and in its status file."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ..atomic_file import write_atomically
from ..fork_hold import output_lock
from ..rank_environment import rank_from_environment
from ..run_folder import read_json
from ..text import count_noun


class MessageLog:
    """Prints messages, and collects them for the record of the next recording window.

    Attributes:
        messages: Messages printed since the last call of `take_for_record`.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._remarks: dict[str, bool] = {}  # remark -> whether it was printed
        self._printed_once: set[str] = set()
        self._missed = self._unprinted = self._unrecorded = 0
        self._last_missed = ""

    def warn(self, message: str) -> None:
        """Print a message as a line on stderr; ignore a closed or full stderr, which must not fail the job."""
        rank = rank_from_environment()
        prefix = "" if rank is None else f"rank {rank}: "
        line = " ".join(f"{prefix}{message}".split())
        self.messages.append(line)
        try:
            with output_lock:
                sys.stderr.write(f"etloom: {line}\n")
                sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self.messages.append("stderr could not be written")

    def warn_once(self, line: str) -> None:
        """Print a message only the first time, although every recording window may report it."""
        if line not in self._printed_once:
            self._printed_once.add(line)
            self.warn(line)

    def report_missed(self, line: str, *, sparingly: bool) -> None:
        """Print the message `line` about a missed recording window; with `sparingly`, print few and count the others.

        With `sparingly` only the first, tenth, hundredth and so on are printed: a job of days may miss thousands.
        """
        self._missed += 1
        self._last_missed = line
        if not sparingly or self._missed == 1:
            self.warn(line)
        elif _is_decimal_power(self._missed):
            self._unprinted = 0
            self.warn(f"{line} ({count_noun(self._missed, 'window')} missed so far)")
        else:
            self._unprinted += 1
            self._unrecorded += 1

    def report_total_missed(self) -> None:
        """Print the number of recording windows that were missed, if some of them were not reported individually."""
        if self._unprinted:
            self._unprinted = 0
            self.warn(
                f"{count_noun(self._missed, 'window')} missed in total; the last one: {self._last_missed}"
            )

    def remark(self, line: str) -> None:
        """Store a message about the open recording window; it is printed once, when a window closes."""
        self._remarks.setdefault(line, False)

    def take_for_record(self, *, has_several_windows: bool) -> list[str]:
        """Print the stored remarks, and return all messages for the record of the recording window that closes now.

        With several windows each gets the messages since the previous one.
        """
        for line in [line for line, printed in self._remarks.items() if not printed]:
            self.warn(line)
            self._remarks[line] = True
        messages = list(self.messages)
        if self._unrecorded:
            messages.append(
                f"{count_noun(self._unrecorded, 'more window')} missed before this one: {self._last_missed}"
            )
            self._unrecorded = 0
        if has_several_windows:
            self.messages.clear()
        return messages


def _is_decimal_power(number: int) -> bool:
    return str(number).strip("0") == "1"


# Status files of the job's processes: their steps and how they ended, stored in the run's hidden folder.
#
# The launcher reads them to explain why nothing was recorded (diagnosis.py).

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
