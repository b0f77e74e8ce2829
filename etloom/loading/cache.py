"""What was read and linked once is kept as Parquet, so that opening unchanged files again costs a tenth.

The folder is ``$ETLOOM_CACHE``, else ``etloom`` in the user's cache folder; never beside the user's files. An entry is
keyed by the files' paths, sizes and times of change, by the options, and by our own version and schema. The entries
used longest ago are removed when all of them take more than ``$ETLOOM_CACHE_BYTES`` (default 4 GB).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import TABLES
from etloom.core.trace import Trace
from etloom.core.version import __version__
from etloom.formats import parquet as reader
from etloom.formats.parquet import writer as writer
from etloom.loading.cache_usage import EntryLease, find_entries_in_use, get_usage

LIMIT_BYTES = 4 * 10**9
_PRUNE_FRACTION = 64
"""Part of the limit that is written before the folder is looked through again: of many ranks each is an entry."""

_WRITE_ERRORS = (OSError, pl.exceptions.PolarsError)
"""What a full disk raises: polars has errors of its own for it."""


def cache_folder() -> Path:
    """Where entries are kept; it need not exist yet."""
    if chosen := os.environ.get("ETLOOM_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "etloom"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etloom"


def entry_key(files: Sequence[Path], **options: Any) -> str | None:
    """The key of what these files give with these options; None for what cannot be known by a file's state."""
    try:
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError:
        return None
    if not all(file.is_file() for file in files):
        return None
    schema = [
        (name, [(column.name, str(column.dtype)) for column in TABLES[name].columns]) for name in TABLES
    ]
    text = json.dumps([__version__, schema, states, sorted(options.items())], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_entry(key: str | None) -> Trace | None:
    """The entry of that key, or None; a damaged entry is none."""
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
    # Another process may have removed or replaced the entry meanwhile: a table that was away would read as empty.
    if before is None or _inode(entry) != before:
        return None
    with contextlib.suppress(OSError):
        os.utime(entry / "meta.json")  # the time of use, by which the oldest are removed
    return trace if isinstance(trace, Trace) else None


def open_or_create(keys: Sequence[str | None], make: Callable[[Path], None]) -> Trace:
    """The first entry of these keys that there is, its tables left on disk; else that of the last one, made.

    make: writes the Trace to a folder. Where the cache cannot be used (a key is None, a read-only home, a full disk,
    what is in use fills it) this is a temporary one, which goes with the Trace. Raises what ``make`` raises, and
    ReadError where no disk has room.
    """
    for key in keys:
        if (found := open_entry(key)) is not None:
            return found
    if (key := keys[-1]) is not None and (found := _create_entry(key, make)) is not None:
        return found
    owner, place = EntryLease(), Path(tempfile.mkdtemp(prefix="etloom-"))
    weakref.finalize(owner, shutil.rmtree, place, ignore_errors=True)  # also when the process ends
    try:
        make(place / "trace.parquet")
    except _WRITE_ERRORS as error:
        raise ReadError(
            f"cannot hold the tables of a trace: {str(error).partition(chr(10))[0]}",
            where=place.parent,
            remedy="set TMPDIR to a folder on a disk with room",
        ) from None
    made = reader.read(place / "trace.parquet", lazy=True, owner=owner)
    assert isinstance(made, Trace)
    return made


def _create_entry(key: str, make: Callable[[Path], None]) -> Trace | None:
    """The entry of that key, made, its tables left on disk; None where the cache cannot be used."""
    entry, held = cache_folder() / key, get_usage(cache_folder())
    if held.in_use >= _limit_bytes() or not _is_writable(cache_folder()):
        return None
    with contextlib.suppress(*_WRITE_ERRORS):
        _open = held.hold(entry, 0)  # nobody removes it before it is opened
        make(entry)
        found = open_entry(key)
        _register_entry(entry)
        return found
    return None


def open_entry(key: str | None) -> Trace | None:
    """The entry of that key, its tables left on disk, or None; a damaged entry is none."""
    if key is None or not reader.sniff_folder(entry := cache_folder() / key):
        return None
    try:
        owner = get_usage(cache_folder()).hold(entry, _entry_bytes(entry))
        trace = reader.read(entry, lazy=True, owner=owner)
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
    """Keep an entry. A cache that cannot be written (read-only home, full disk) is no trouble of the caller's."""
    if key is None:
        return
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        writer.write(trace, cache_folder() / key)
        _register_entry(cache_folder() / key)
    except (*_WRITE_ERRORS, EtloomError):
        return


def _register_entry(entry: Path) -> None:
    """Note that an entry was written, and remove others where they take too much."""
    with contextlib.suppress(OSError):  # another process may have removed it
        if get_usage(cache_folder()).wrote(_entry_bytes(entry), _limit_bytes() // _PRUNE_FRACTION):
            _prune(_limit_bytes())


def clear_cache() -> int:
    """Remove all entries; their bytes."""
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
    """Remove an entry, out of sight first: whoever reads it at that moment can see that it went."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".gone-", dir=entry.parent) as gone:
        entry.rename(Path(gone, entry.name))


def _entry_bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.iterdir())


def _list_entries() -> list[tuple[float, int, Path]]:
    """(time of last use, bytes, path) of every entry of ours; nothing else in the folder is touched."""
    found = []
    for meta in cache_folder().glob("*/meta.json"):
        if not re.fullmatch("[0-9a-f]{32}", meta.parent.name) or meta.parent.is_symlink():
            continue
        with contextlib.suppress(OSError):
            found.append((meta.stat().st_mtime, _entry_bytes(meta.parent), meta.parent))
    return found
