"""The cache: linked traces as Parquet, so that opening unchanged files again takes a tenth of the time.

The folder is ``$ETLOOM_CACHE``, else ``etloom`` in the user's cache folder; never next to the user's files. The key of
an entry consists of the files' paths, sizes and modification times, the options, and etloom's version and schema. The
least recently used entries are removed when the total size exceeds ``$ETLOOM_CACHE_BYTES`` (default 4 GB).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError, ReadError
from etloom.core.paths import cache_folder as cache_folder
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.core.version import compute_code_digest
from etloom.formats import parquet as reader
from etloom.formats.parquet import writer as writer
from etloom.loading.cache_usage import EntryLease, find_entries_in_use, get_usage

LIMIT_BYTES = 4 * 10**9
_PRUNE_FRACTION = 64
"""The folder is searched again after this fraction of the limit was written: each rank is an entry."""

_WRITE_ERRORS = (OSError, pl.exceptions.PolarsError)
"""Exceptions that a full disk raises: polars has its own."""


def entry_key(files: Sequence[Path], **options: Any) -> str | None:
    """Return the key of files read with these options; None if one is not a regular file."""
    try:
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError:
        return None
    if not all(file.is_file() for file in files):
        return None
    schema = [
        (name, [(column.name, str(column.dtype)) for column in TABLES[name].columns]) for name in TABLES
    ]
    text = json.dumps([compute_code_digest(), schema, states, sorted(options.items())], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def has_entry(key: str) -> bool:
    """Return whether an entry exists."""
    return reader.sniff_folder(cache_folder() / key)


def load_entry(key: str | None) -> Trace | None:
    """Load an entry into memory; None if it does not exist or is damaged."""
    if key is None:
        return None
    entry = cache_folder() / key
    before = _inode(entry)
    if not reader.sniff_folder(entry):
        return None
    try:
        trace = reader.read(entry)
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
    """Open the first existing entry of the keys with its tables left on disk, or create that of the last key.

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
    except _WRITE_ERRORS as error:
        raise ReadError(
            f"cannot write the tables of a trace: {str(error).partition(chr(10))[0]}",
            where=folder.parent,
            remedy="set TMPDIR to a folder on a disk with enough space",
        ) from None
    temporary = reader.read(folder / "trace.parquet", lazy=True, owner=lease)
    assert isinstance(temporary, Trace)
    return temporary


def _create_entry(key: str, make: Callable[[Path], None]) -> Trace | None:
    """Create an entry and open it with its tables left on disk; None if the cache cannot be used."""
    entry, usage = cache_folder() / key, get_usage(cache_folder())
    if usage.in_use >= _limit_bytes() or not _is_writable(cache_folder()):
        return None
    with contextlib.suppress(*_WRITE_ERRORS):
        _lease = usage.hold(entry, 0)  # no other process removes it before it is opened
        make(entry)
        trace = open_entry(key)
        _register_entry(entry)
        return trace
    return None


def open_entry(key: str | None) -> Trace | None:
    """Open an entry with its tables left on disk; None if it does not exist or is damaged."""
    if key is None or not reader.sniff_folder(entry := cache_folder() / key):
        return None
    try:
        lease = get_usage(cache_folder()).hold(entry, _entry_bytes(entry))
        trace = reader.read(entry, lazy=True, owner=lease)
        os.utime(entry / "meta.json")
    except (OSError, EtloomError):
        _remove_entry(entry)
        return None
    return trace if isinstance(trace, Trace) else None


def _is_writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


def store_entry(key: str | None, trace: Trace) -> None:
    """Store an entry; a cache that cannot be written (read-only home, full disk) is ignored."""
    if key is None:
        return
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        writer.write(trace, cache_folder() / key)
        _register_entry(cache_folder() / key)
    except (*_WRITE_ERRORS, EtloomError):
        return


def _register_entry(entry: Path) -> None:
    """Record that an entry was written, and remove others if the cache is too large."""
    with contextlib.suppress(OSError):  # another process may have removed it
        if get_usage(cache_folder()).record_write(_entry_bytes(entry), _limit_bytes() // _PRUNE_FRACTION):
            _prune(_limit_bytes())


def clear_cache() -> int:
    """Remove all entries and return their size in bytes."""
    sizes = [size for _, size, _ in _list_entries()]
    for _, _, entry in _list_entries():
        _remove_entry(entry)
    return sum(sizes)


def _limit_bytes() -> int:
    try:
        return int(os.environ.get("ETLOOM_CACHE_BYTES", LIMIT_BYTES))
    except ValueError:
        return LIMIT_BYTES


def _prune(limit: int) -> None:
    entries = sorted(_list_entries())
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
    """Remove an entry by renaming it first: a process that reads it at that moment notices."""
    with (
        contextlib.suppress(OSError),
        tempfile.TemporaryDirectory(prefix=".removed-", dir=entry.parent) as trash,
    ):
        entry.rename(Path(trash, entry.name))


def _entry_bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir())


def _list_entries() -> list[tuple[float, int, Path]]:
    """List (time of last use, bytes, path) of every entry; other files in the folder are ignored."""
    entries = []
    for meta in cache_folder().glob("*/meta.json"):
        if not re.fullmatch("[0-9a-f]{32}", meta.parent.name) or meta.parent.is_symlink():
            continue
        with contextlib.suppress(OSError):
            entries.append((meta.stat().st_mtime, _entry_bytes(meta.parent), meta.parent))
    return entries
