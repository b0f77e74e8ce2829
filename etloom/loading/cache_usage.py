"""Records which cache entries each process has open, so that no process removes an entry that another reads.

A process that leaves tables of an entry on disk appends to its own file in the cache folder: ``+KEY`` when it opens the
entry, ``-KEY`` when the entry is no longer needed. It keeps the file locked as long as it lives, so a file that is not
locked is from a process that has ended, in whatever way.
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
    """A lease on a cache entry or temporary folder, whose files may be removed once the lease is garbage-collected."""


class CacheUsage:
    """The cache entries that this process has open, and the number of bytes it has written to the cache folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._bytes = 0
        self._released: deque[tuple[str, int]] = deque()
        self._file: int | None = None
        self._written: int | None = None

    def hold(self, entry: Path, size: int) -> EntryLease:
        """Record that an entry of ``size`` bytes is open until the returned lease is garbage-collected."""
        lease = EntryLease()
        with self._lock:
            self._settle()
            self._bytes += size
            self._note(f"+{entry.name}\n")
        # Finalizers run at any time, in any thread, so this one takes no lock.
        weakref.finalize(lease, self._released.append, (entry.name, size)).atexit = False
        return lease

    @property
    def in_use(self) -> int:
        """The total size in bytes of the entries that this process has open."""
        with self._lock:
            self._settle()
            return self._bytes

    def record_write(self, size: int, interval: int) -> bool:
        """Record that this process wrote ``size`` bytes to the cache folder.

        Returns:
            True if the folder is to be searched for entries to remove: at first, and after each ``interval`` bytes.
        """
        with self._lock:
            self._settle()
            due = self._written is None or self._written + size > interval
            self._written = 0 if due else (self._written or 0) + size
            return due

    def _settle(self) -> None:
        while self._released:
            name, size = self._released.popleft()
            self._bytes -= size
            self._note(f"-{name}\n")

    def _note(self, line: str) -> None:
        with contextlib.suppress(OSError):  # without the note only this process knows
            if self._file is None:
                self._file = _create_locked_file(self._folder)
            os.write(self._file, line.encode())


def _create_locked_file(folder: Path) -> int:
    """Create a file in the folder with a lock that lasts until this process ends; return its descriptor."""
    import fcntl  # not available on every system

    file, path = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        os.close(file)
        os.unlink(path)  # noqa: PTH108
        raise
    return file


def get_usage(folder: Path) -> CacheUsage:
    """Return the `CacheUsage` of this process for a cache folder."""
    return _get_usage(folder, os.getpid())


@functools.cache
def _get_usage(folder: Path, process: int) -> CacheUsage:
    """Return the `CacheUsage` of a process for a cache folder; a forked process does not inherit its parent's.

    Its parent may still need the entries.
    """
    return CacheUsage(folder)


def find_entries_in_use(folder: Path) -> set[str]:
    """Return the names of cache entries that running processes have open; delete the usage files of ended processes."""
    get_usage(folder).in_use  # noqa: B018 - records released entries
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
                if path.stat().st_size:  # otherwise it was created just now and is not locked yet
                    path.unlink()
    return names
