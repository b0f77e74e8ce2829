"""Cache linked runs as a store in the user's cache folder, so that opening unchanged files again is ten times faster.

    CACHE/runs/run=KEY/rank=N/      the tables of a rank (small ones as one file), each added when it was read
    CACHE/runs/run=KEY/meta.json    of a run with answers (`etloom.exports.store.cached_runs`), written last
    CACHE/runs/run=KEY/.in-use      locked by the processes that have the run open

The folder is ``$ETLOOM_CACHE``, else ``etloom`` in the user's cache folder; never next to the user's files. The key of
a run consists of its files' paths, sizes and modification times, the options and limits (a file beyond one is missing),
and etloom's version and schema. The
least recently used runs are removed when the total size exceeds ``$ETLOOM_CACHE_BYTES`` (default 4 GB).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import threading
import weakref
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

_REMOVED = ".removed-"
_EARLIER_RUN = "[0-9a-f]" * 32
"""Folders of cached ranks of earlier versions."""
_NO_LOCKS = (errno.ENOENT, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a lock on a run that no process can have locked: it is gone, or its file system has no locks."""

_written: dict[Path, int] = {}
"""Bytes that this process wrote to each cache folder since it last searched for runs to remove."""

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
            states += [str(folder.resolve()), *_list_states(folder.resolve(), depth=2)]
    except OSError:
        return None
    schema = [
        (name, [(column.name, str(column.dtype)) for column in TABLES[name].columns]) for name in TABLES
    ]
    limits = {name: value for name, value in os.environ.items() if name.startswith("ETLOOM_MAX_")}
    facts = sorted({**options, "names": list_user_files(), "limits": limits}.items())
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


def has_room(size: int = 0) -> bool:
    """Return whether the cache can be written, and has room for ``size`` more bytes next to what is in use."""
    if measure_use() >= limit_bytes() or size > limit_bytes():
        return False
    try:
        return os.access(folder := create_cache_folder(), os.W_OK) and (
            not size or size <= shutil.disk_usage(folder).free
        )
    except OSError:
        return False


def register_write(size: int) -> None:
    """Record that ``size`` bytes were written; remove the least recently used runs if the cache is too large."""
    folder = cache_folder()
    written = _written.get(folder)
    is_due = written is None or written + size > limit_bytes() // _PRUNE_FRACTION
    _written[folder] = 0 if is_due else (written or 0) + size
    if is_due:
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
    total = before = sum(size for _, size, _ in runs)
    for _, size, run in runs:
        if (total > limit or not size) and remove_unused(run):
            total -= size
    return before - total


def remove(folder: Path) -> None:
    """Remove a cached run or a rank of one, after renaming it so that processes which read it at that moment notice."""
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix=_REMOVED, dir=folder.parent) as trash,
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
    """List (time of last use, size in bytes, path) of each cached run, and of what interrupted removals left."""
    runs, entries = cache_folder() / RUNS, []
    for folder in (*runs.glob("run=*"), *runs.glob(f"{_REMOVED}*"), *cache_folder().glob(_EARLIER_RUN)):
        with contextlib.suppress(OSError):
            if not folder.is_symlink():
                entries.append((folder.stat().st_mtime, _measure_bytes(folder), folder))
    return entries


class Lease:
    """Marks a cached run as in use, until it is garbage-collected or the process ends, in whatever way.

    It is a shared lock on a file in the run; a run is removed only by a process that gets the lock alone.

    Args:
        run: the folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self.cache, self.sizes = cache_folder(), dict[Path, int]()
        with contextlib.suppress(OSError, ImportError):  # a read-only cache, a file system without locks
            create_cache_folder()
            weakref.finalize(self, os.close, _lock_shared(run)).atexit = False
        mark_used(run)
        with _leases_lock:
            _leases.add(self)

    def cover(self, part: Path) -> int:
        """Count the size of a part of the run as in use, and return it in bytes."""
        if part not in self.sizes:
            self.sizes[part] = _measure_bytes(part)
        return self.sizes[part]


def _lock_shared(run: Path) -> int:
    """Return a descriptor of the lock file of a run, locked; the run is created if another process has removed it."""
    import fcntl

    while True:
        run.mkdir(parents=True, exist_ok=True)
        file = os.open(run / _LOCK, os.O_RDONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)  # waits while a process removes the run
            if os.path.samestat(os.fstat(file), (run / _LOCK).stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()
_leases_lock = threading.Lock()
_LOCK = ".in-use"


def measure_use() -> int:
    """Return the size of the parts of cached runs that this process has open, bytes."""
    folder = cache_folder()
    with _leases_lock:
        return sum(sum(list(lease.sizes.values())) for lease in _leases if lease.cache == folder)


def remove_unused(run: Path) -> bool:
    """Remove a cached run and return True, unless a process has it open."""
    try:
        import fcntl

        with (run / _LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(run)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # in use, of another user, or it cannot be known
            return False
        remove(run)
    except ImportError:
        remove(run)
    return True
