"""Cache linked traces as Parquet (small ones as one file), so that opening unchanged files again is ten times faster.

The folder is ``$ETLOOM_CACHE``, else ``etloom`` in the user's cache folder; never next to the user's files. The key of
an entry consists of the files' paths, sizes and modification times, the options, and etloom's version and schema. The
least recently used entries are removed when the total size exceeds ``$ETLOOM_CACHE_BYTES`` (default 4 GB).

A run of many ranks is one entry, a run of the store in the folder `RUNS` (`etloom.exports.store.cached_runs`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError, ReadError
from etloom.core.paths import cache_folder as cache_folder
from etloom.core.paths import create_cache_folder
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.core.version import compute_code_digest
from etloom.formats import parquet as reader
from etloom.formats.parquet import writer as writer
from etloom.formats.parquet.store_layout import ADDING

LIMIT_BYTES = 4 * 10**9
RUNS = "runs"
"""The store of runs of many ranks in the cache."""
_MAX_ADDING_SECONDS = 86_400
"""Age at which the files of an interrupted addition of a run or of an entry are removed."""
_SCRATCH = re.compile(r"\.[0-9a-f]{32}\.[0-9a-f]{8}(\.old)?")
_PRUNE_FRACTION = 64
"""Entries to remove are searched for each time that this fraction of the limit was written."""

WRITE_ERRORS = (OSError, pl.exceptions.PolarsError)
"""Exceptions that a full disk raises: polars has its own."""


def entry_key(files: Sequence[Path], **options: Any) -> str | None:
    """Return the cache key of files that are read with ``options``; None if any of the files is not a regular file."""
    try:
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError:
        return None
    if not all(file.is_file() for file in files):
        return None
    return _make_key(states, options)


def folder_key(folder: Path, **options: Any) -> str:
    """Return the cache key of a folder that is read with ``options``, without opening the files in it.

    It changes with the files of the folder and of the folders in it. Raises OSError.
    """
    return _make_key([str(folder.resolve()), *_list_states(folder, depth=2)], options)


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


def _make_key(states: Sequence[Any], options: dict[str, Any]) -> str:
    schema = [
        (name, [(column.name, str(column.dtype)) for column in TABLES[name].columns]) for name in TABLES
    ]
    text = json.dumps([compute_code_digest(), schema, states, sorted(options.items())], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def has_entry(key: str) -> bool:
    """Return whether the cache contains an entry with the key ``key``."""
    return reader.sniff_folder(cache_folder() / key)


def load_entry(key: str | None) -> Trace | None:
    """Load a cache entry into memory; None if it does not exist or is damaged."""
    if key is None:
        return None
    entry = cache_folder() / key
    before = _inode(entry)
    if not reader.sniff_folder(entry):
        return None
    try:
        trace = reader.read(entry, owner=entry)
    except EtloomError:
        _remove_entry(entry)
        return None
    # If another process removed or replaced the entry meanwhile, a missing table would read as empty.
    if before is None or _inode(entry) != before:
        return None
    with contextlib.suppress(OSError):
        os.utime(entry / "meta.json")  # the time of use, for the order of removal
    return trace if isinstance(trace, Trace) else None


def open_or_create(keys: Sequence[str | None], make: Callable[[Path], None]) -> Trace:
    """Open the first cache entry of ``keys`` that exists, else create an entry for the last key; tables stay on disk.

    If the cache cannot be used (the key is None, the home is read-only, the disk is full, or entries in use fill the
    cache), the entry is a temporary folder that is removed with the Trace.

    Args:
        keys: keys of the entries; None for none.
        make: writes the Trace to a folder; what it raises is passed on.

    Raises:
        ReadError: no disk has enough space.
    """
    for key in keys:
        if (trace := open_entry(key)) is not None:
            return trace
    if (key := keys[-1]) is not None and (trace := _create_entry(key, make)) is not None:
        return trace
    lease, folder = EntryLease(), Path(tempfile.mkdtemp(prefix="etloom-"))
    weakref.finalize(lease, shutil.rmtree, folder, ignore_errors=True)  # also when the process ends
    try:
        make(folder / "trace.parquet")
    except WRITE_ERRORS as error:
        raise ReadError(
            f"cannot write the tables of a trace: {str(error).partition(chr(10))[0]}",
            where=folder.parent,
            remedy="set TMPDIR to a folder on a disk with enough space",
        ) from None
    temporary = reader.read(folder / "trace.parquet", lazy=True, owner=lease)
    assert isinstance(temporary, Trace)
    return temporary


def _create_entry(key: str, make: Callable[[Path], None]) -> Trace | None:
    """Create a cache entry and open it, with its tables on disk; None if the cache cannot be used."""
    entry, usage = cache_folder() / key, get_usage(cache_folder())
    if usage.in_use >= limit_bytes() or not _is_writable():
        return None
    with contextlib.suppress(*WRITE_ERRORS):
        _lease = usage.hold(entry, 0)  # no other process removes it before it is opened
        make(entry)
        trace = open_entry(key)
        register_entry(entry)
        return trace
    return None


def open_entry(key: str | None) -> Trace | None:
    """Open a cache entry, with its tables on disk; None if it does not exist or is damaged."""
    if key is None or not reader.sniff_folder(entry := cache_folder() / key):
        return None
    try:
        trace = reader.read(entry, lazy=True, owner=hold_entry(entry))
    except (OSError, EtloomError):
        _remove_entry(entry)
        return None
    return trace if isinstance(trace, Trace) else None


def hold_entry(entry: Path) -> EntryLease:
    """Mark a cache entry as just used, and as in use until the returned lease is garbage-collected. Raises OSError."""
    os.utime(entry / "meta.json")  # the time of use, for the order of removal
    return get_usage(cache_folder()).hold(entry, _entry_bytes(entry))


def has_room(size: int) -> bool:
    """Return whether the cache can store an entry of ``size`` bytes: writable, within its limit, enough free disk."""
    return size <= limit_bytes() and _is_writable() and size <= shutil.disk_usage(cache_folder()).free


def _is_writable() -> bool:
    try:
        return os.access(create_cache_folder(), os.W_OK)
    except OSError:
        return False


def store_entry(key: str | None, trace: Trace) -> None:
    """Write a trace to the cache; errors (read-only home, full disk) are ignored."""
    if key is None:
        return
    try:
        create_cache_folder()
        writer.write(trace, cache_folder() / key, packs=True)
        register_entry(cache_folder() / key)
    except (*WRITE_ERRORS, EtloomError):
        return


def register_entry(entry: Path) -> None:
    """Record that a cache entry was written; if the cache exceeds its size limit, remove the least recently used."""
    with contextlib.suppress(OSError):  # another process may have removed it
        if get_usage(cache_folder()).record_write(_entry_bytes(entry), limit_bytes() // _PRUNE_FRACTION):
            _prune(limit_bytes())


def clear_cache() -> int:
    """Remove all cache entries that no process has open, and return the sum of their sizes in bytes."""
    in_use = find_entries_in_use(cache_folder())
    entries = [(size, entry) for _, size, entry in list_entries() if entry.name not in in_use]
    for _, entry in entries:
        _remove_entry(entry)
    return sum(size for size, _ in entries)


def limit_bytes() -> int:
    """Return the size limit of the cache, bytes."""
    try:
        return int(os.environ.get("ETLOOM_CACHE_BYTES", LIMIT_BYTES))
    except ValueError:
        return LIMIT_BYTES


def _prune(limit: int) -> None:
    entries = sorted(list_entries())
    in_use = find_entries_in_use(cache_folder())
    total = sum(size for _, size, _ in entries)
    for _, size, entry in entries:
        if total <= limit:
            return
        if entry.name in in_use:
            continue
        _remove_entry(entry)
        total -= size


def _inode(entry: Path) -> int | None:
    try:
        return (entry / "meta.json").stat().st_ino
    except OSError:
        return None


def _remove_entry(entry: Path) -> None:
    """Remove a cache entry, after renaming it so that processes which read it at that moment notice."""
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix=".removed-", dir=entry.parent) as trash,
    ):
        entry.rename(Path(trash, entry.name))


def _entry_bytes(entry: Path) -> int:
    with os.scandir(entry) as content:
        return sum(
            _entry_bytes(Path(item.path)) if item.is_dir(follow_symlinks=False) else item.stat().st_size
            for item in content
        )


def list_entries() -> list[tuple[float, int, Path]]:
    """List (time of last use, size in bytes, path) of each cache entry; other files in the folder are ignored."""
    entries = []
    for folder in _list_entry_folders():
        with contextlib.suppress(OSError):
            meta = folder / "meta.json"
            last_use = (meta if meta.exists() else folder).stat().st_mtime
            entries.append((last_use, _entry_bytes(folder), folder))
    return entries


def _list_entry_folders() -> Iterator[Path]:
    for meta in cache_folder().glob("*/meta.json"):
        if re.fullmatch("[0-9a-f]{32}", meta.parent.name) and not meta.parent.is_symlink():
            yield meta.parent
    runs = cache_folder() / RUNS
    yield from (meta.parent for meta in runs.glob("run=*/meta.json"))
    scratch = (folder for folder in cache_folder().glob(".*") if _SCRATCH.fullmatch(folder.name))
    for folder in (*(runs / ADDING).glob("*-*/"), *scratch):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _MAX_ADDING_SECONDS:
                yield folder


# Records which cache entries each process has open, so that no process removes an entry that another reads.
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
