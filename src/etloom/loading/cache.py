"""Cache linked runs as a store in the user's cache folder, so that opening unchanged files again is ten times faster.

    CACHE/runs/run=KEY/rank=N/      the tables of a rank (small ones as one file), each added when it was read
    CACHE/runs/run=KEY/meta.json    of a run with answers (`etloom.exports.store.cached_runs`), written last

The folder is ``$ETLOOM_CACHE``, else ``etloom`` in the user's cache folder; never next to the user's files. The key of
a run consists of its files' paths, sizes and modification times, the options, and etloom's version and schema. The
least recently used runs are removed when the total size exceeds ``$ETLOOM_CACHE_BYTES`` (default 4 GB).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.names import list_user_files
from etloom.core.paths import cache_folder as cache_folder
from etloom.core.paths import create_cache_folder
from etloom.core.schema import TABLES
from etloom.core.version import compute_code_digest
from etloom.formats.parquet.store_layout import run_folder

LIMIT_BYTES = 4 * 10**9
RUNS = "runs"
"""The store of runs in the cache folder."""
_PRUNE_FRACTION = 64
"""Runs to remove are searched for each time that this fraction of the limit was written."""

WRITE_ERRORS = (OSError, pl.exceptions.PolarsError)
"""Exceptions that a full disk raises: polars has its own."""


def make_key(files: Sequence[Path], folder: Path | None = None, **options: Any) -> str | None:
    """Return the key of files that are read with ``options``; None if any of them is not a regular file.

    ``folder``: the key also changes with all files in this folder and in the folders in it, which are not opened.
    """
    try:
        states: list[Any] = [
            (str(file.resolve()), (state := file.stat()).st_size, state.st_mtime_ns) for file in files
        ]
        if not all(file.is_file() for file in files):
            return None
        if folder is not None:
            states += [str(folder.resolve()), *_list_states(folder, depth=2)]
    except OSError:
        return None
    schema = [
        (name, [(column.name, str(column.dtype)) for column in TABLES[name].columns]) for name in TABLES
    ]
    facts = sorted({**options, "names": list_user_files()}.items())
    text = json.dumps([compute_code_digest(), schema, states, facts], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _list_states(folder: Path, depth: int) -> list[tuple[str, int, int, int]]:
    """List (path, bytes, modification time, status-change time) of all visible entries in a folder; times in ns."""
    states = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            state = entry.stat()
            # A file that could not be read may be readable after a change of its mode.
            states.append((entry.path, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
            if depth > 1 and entry.is_dir():
                states += _list_states(Path(entry.path), depth - 1)
    return sorted(states)


def locate_run(key: str) -> Path:
    """Return the folder of the run with the key ``key`` in the cache; it need not exist."""
    return run_folder(cache_folder() / RUNS, key)


def mark_used(run: Path) -> None:
    """Set the time of use of a cached run, for the order of removal."""
    with contextlib.suppress(OSError):  # a read-only cache
        os.utime(run)


def hold(run: Path, part: Path | None = None) -> EntryLease:
    """Mark a cached run as just used, and as in use until the returned lease is garbage-collected.

    ``part``: the folder in it that is used (default: all of it), whose size counts as in use.
    """
    mark_used(run)
    return get_usage(cache_folder()).hold(run, _measure_bytes(part or run))


def has_room(size: int = 0) -> bool:
    """Return whether the cache can be written, and has room for ``size`` more bytes next to what is in use."""
    in_use = get_usage(cache_folder()).in_use
    if in_use >= limit_bytes() or size > limit_bytes():
        return False
    try:
        return os.access(folder := create_cache_folder(), os.W_OK) and (
            not size or size <= shutil.disk_usage(folder).free
        )
    except OSError:
        return False


def register_write(part: Path) -> None:
    """Record that ``part`` of a run was written; remove the least recently used runs if the cache is too large."""
    if get_usage(cache_folder()).record_write(_measure_bytes(part), limit_bytes() // _PRUNE_FRACTION):
        _prune(limit_bytes())


def clear_cache() -> int:
    """Remove all cached runs that no process has open, and return the sum of their sizes in bytes."""
    return _prune(0)


def limit_bytes() -> int:
    """Return the size limit of the cache, bytes."""
    try:
        return int(os.environ.get("ETLOOM_CACHE_BYTES", LIMIT_BYTES))
    except ValueError:
        return LIMIT_BYTES


def _prune(limit: int) -> int:
    """Remove runs, least recently used first, until the cache has at most ``limit`` bytes; return the removed bytes."""
    runs = sorted(list_entries())
    in_use = find_entries_in_use(cache_folder())
    total = before = sum(size for _, size, _ in runs)
    for _, size, run in runs:
        if total <= limit:
            break
        if run.name not in in_use:
            remove(run)
            total -= size
    return before - total


def discard(run: Path) -> None:
    """Remove a cached run unless a process has it open."""
    if run.name not in find_entries_in_use(cache_folder()):
        remove(run)


def remove(folder: Path) -> None:
    """Remove a cached run or a rank of one, after renaming it so that processes which read it at that moment notice."""
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix=".removed-", dir=folder.parent) as trash,
    ):
        folder.rename(Path(trash, folder.name))


def _measure_bytes(folder: Path) -> int:
    """Return the size of the files in a folder, bytes; another process may remove it meanwhile."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as content:
        for item in content:
            is_folder = item.is_dir(follow_symlinks=False)
            total += _measure_bytes(Path(item.path)) if is_folder else item.stat().st_size
    return total


def list_entries() -> list[tuple[float, int, Path]]:
    """List (time of last use, size in bytes, path) of each cached run; other files in the folder are ignored."""
    entries = []
    for folder in (cache_folder() / RUNS).glob("run=*"):
        with contextlib.suppress(OSError):
            if not folder.is_symlink():
                entries.append((folder.stat().st_mtime, _measure_bytes(folder), folder))
    return entries


# Records which cached runs each process has open, so that no process removes a run that another reads.
#
# A process that leaves tables of an entry on disk appends to its own file in the cache folder: ``+KEY`` when it opens
# the entry, ``-KEY`` when the entry is no longer needed. It keeps the file locked as long as it lives, so a file that
# is not locked is from a process that has ended, in whatever way.

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
