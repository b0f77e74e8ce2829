"""Which entries of the cache are open, so that no process removes one from under another, and how much was written.

A process that leaves tables of an entry on disk appends to a file of its own in the cache folder: ``+KEY`` when it
opens the entry, ``-KEY`` when nobody needs it any more. It keeps the file locked as long as it lives, so that one that
is not locked is of a process that ended, however it did.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import weakref
from collections import Counter, deque
from pathlib import Path

_PREFIX = ".open-"


class EntryLease:
    """Lives as long as the files of an entry, or of a temporary folder, are needed."""


class CacheUsage:
    """What this process has open of a cache folder, and what it wrote there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._bytes = 0
        self._gone: deque[tuple[str, int]] = deque()
        self._file: int | None = None
        self._written: int | None = None

    def hold(self, entry: Path, size: int) -> EntryLease:
        """Note that an entry of so many bytes is open, as long as the Owner lives."""
        owner = EntryLease()
        with self._lock:
            self._settle()
            self._bytes += size
            self._note(f"+{entry.name}\n")
        # Where and when it is called is not ours to say: it takes no lock.
        weakref.finalize(owner, self._gone.append, (entry.name, size)).atexit = False
        return owner

    @property
    def in_use(self) -> int:
        """Bytes of the entries that are open here."""
        with self._lock:
            self._settle()
            return self._bytes

    def wrote(self, size: int, often: int) -> bool:
        """Note that so many bytes were written. Whether it is time to look the folder through: at first, and each time
        ``often`` bytes were written."""
        with self._lock:
            self._settle()
            due = self._written is None or self._written + size > often
            self._written = 0 if due else (self._written or 0) + size
            return due

    def _settle(self) -> None:
        while self._gone:
            name, size = self._gone.popleft()
            self._bytes -= size
            self._note(f"-{name}\n")

    def _note(self, line: str) -> None:
        with contextlib.suppress(
            OSError
        ):  # of what cannot be noted others do not know; this process still does
            if self._file is None:
                self._file = _create_locked_file(self._folder)
            os.write(self._file, line.encode())


def _create_locked_file(folder: Path) -> int:
    """A new file in the folder, locked as long as this process lives."""
    import fcntl  # which not every system has

    file, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        os.close(file)
        os.unlink(path)  # noqa: PTH108
        raise
    return file


def get_usage(folder: Path) -> CacheUsage:
    """That of this process for a cache folder."""
    return _get_usage(folder, os.getpid())


@functools.cache
def _get_usage(folder: Path, process: int) -> CacheUsage:
    """A process that was forked begins anew: what it lets go its parent may still need."""
    return CacheUsage(folder)


def find_entries_in_use(folder: Path) -> set[str]:
    """The entries of a cache folder that a process has open which is alive. What others left behind is removed."""
    get_usage(folder).in_use  # noqa: B018 - what went here is noted
    names: set[str] = set()
    try:
        import fcntl
    except ImportError:
        return names
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                lines = Counter(file.read().split())
                names |= {
                    line[1:] for line in lines if line[0] == "+" and lines[line] > lines[f"-{line[1:]}"]
                }
            else:
                if path.stat().st_size:  # else it was made this moment, and is not locked yet
                    path.unlink()
    return names
