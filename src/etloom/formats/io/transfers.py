"""Parallel transfers between object stores and local files, in byte ranges, with retries.

A local file appears under its name when it is complete. Its time of change becomes the stamp of the object, so that
size and time decide, as for any local file, whether a copy is current.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from etloom.core.errors import EtloomError, LimitError, ReadError
from etloom.core.text import count_noun
from etloom.formats.io.object_store import ObjectStore, RemoteFile, StalledRequest, TransientError

TRIES, STALLED_TRIES = 5, 2
"""Tries of a request whose connection fails, or that gets no complete answer in a minute."""
BACKOFF_S = 0.2
"""Pause before the second try; it doubles with each."""
PARALLEL = 16
RANGE_BYTES = 8 << 20
_NS = 10**9
_CHECK = "ETLOOM_REMOTE_MD5"
"""Environment variable: 0 if ETags are not MD5s."""
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


def retry(action: Callable[[], _Result]) -> _Result:
    """Call ``action`` and return its result; if a connection fails or stalls, pause and repeat it.

    Raises:
        ReadError: the connection failed every time, or the action was refused.
    """
    stalls = 0
    for attempt in itertools.count(1):
        try:
            return action()
        except TransientError as error:
            stalls += isinstance(error, StalledRequest)
            if attempt >= TRIES or stalls >= STALLED_TRIES:
                raise ReadError(
                    f"the connection failed {attempt} times: {error.what}",
                    where=error.where,
                    remedy="check the URL and the network, and try again",
                ) from None
        time.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))  # noqa: S311
    raise AssertionError


def run_parallel(action: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Call an action for all items in parallel, with retries; return the results in order, or raise the first error."""
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="etloom-transfer") as pool:
        try:
            return list(pool.map(lambda item: retry(lambda: action(item)), items))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def is_current(local: Path, file: RemoteFile) -> bool:
    """Return whether a local file is a current copy of an object: same size, and its stamp as modification time."""
    try:
        state = local.stat()
    except OSError:
        return False
    return state.st_size == file.size and state.st_mtime_ns == file.stamp_ns


def download(store: ObjectStore, files: Sequence[tuple[RemoteFile, Path]]) -> None:
    """Download objects to local files in parallel; each file appears when it is complete.

    Raises:
        ReadError: an object cannot be read, or changes while it is read.
        LimitError: the disk has not enough space.
    """
    if not files:
        return
    _check_space(files)
    downloads = [_Download(file, target, _partial_name(target)) for file, target in files]
    try:
        for folder in {item.target.parent for item in downloads}:
            folder.mkdir(parents=True, exist_ok=True)
        for item in downloads:
            item.partial.touch()
        damaged = _read_files(store, downloads)
        if damaged := damaged and _read_files(store, damaged):
            raise ReadError(
                f"the bytes of {count_noun(len(damaged), 'object')} differ from the MD5 (ETag)",
                where=damaged[0].file.key,
                remedy=f"upload it again; if the store encrypts with keys of its own (KMS), set {_CHECK}=0",
            )
        run_parallel(lambda item: item.finish(store), downloads)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(files[0][1].parent, "the disk is full") from None
        raise EtloomError(
            f"cannot be written: {error.strerror or error}",
            where=error.filename,
            remedy="set ETLOOM_CACHE to a folder that can be written",
        ) from None
    finally:
        for item in downloads:
            item.partial.unlink(missing_ok=True)


def _read_files(store: ObjectStore, downloads: Sequence[_Download]) -> list[_Download]:
    """Download the partial files; return those whose bytes are others than the object's, by the MD5 if it is known."""
    ranges = list(_list_ranges(downloads))
    digests = run_parallel(lambda task: task[0].read(store, task[1]), ranges)
    md5s = {item: digest for (item, _), digest in zip(ranges, digests, strict=True) if digest}
    if os.environ.get(_CHECK) == "0":
        return []
    checks = run_parallel(lambda item: item.has_md5(md5s[item]), md5s)
    return [item for item, is_same in zip(md5s, checks, strict=True) if not is_same]


def _list_ranges(downloads: Iterable[_Download]) -> Iterable[tuple[_Download, int]]:
    for item in downloads:
        for start in range(0, item.file.size, RANGE_BYTES):
            yield item, start


@dataclass(frozen=True)
class _Download:
    """A download in progress: the object, the final local path, and the path of the partial file."""

    file: RemoteFile
    target: Path
    partial: Path

    def read(self, store: ObjectStore, start: int) -> str:
        """Download the range of at most `RANGE_BYTES` at the offset ``start`` into the partial file; return the MD5."""
        length = min(RANGE_BYTES, self.file.size - start)
        data, md5 = store.read_range(self.file.key, start, length)
        if len(data) != length:
            raise TransientError(f"got {len(data):,} of {length:,} bytes", where=self.file.key)
        descriptor = os.open(self.partial, os.O_WRONLY)
        try:
            view, offset = memoryview(data), start
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)
        return md5 or self.file.md5

    def has_md5(self, md5: str) -> bool:
        """Return whether the partial file has this MD5 (hexadecimal)."""
        digest = hashlib.md5(usedforsecurity=False)
        with self.partial.open("rb") as file:
            while block := file.read(RANGE_BYTES):
                digest.update(block)
        return digest.hexdigest() == md5

    def finish(self, store: ObjectStore) -> None:
        """Rename the complete partial file to its final path; raise ReadError if a large object changed meanwhile."""
        # The ranges of an object that was replaced meanwhile do not belong together.
        if self.file.size > RANGE_BYTES and not _is_same(store.find(self.file.key), self.file):
            raise ReadError("changed while it was read", where=self.file.key, remedy="try again")
        os.utime(self.partial, ns=(self.file.stamp_ns, self.file.stamp_ns))
        self.partial.replace(self.target)


def _is_same(now: RemoteFile | None, file: RemoteFile) -> bool:
    """Return whether an object still has the listed size and change time; times are compared in whole seconds."""
    if now is None or now.size != file.size:
        return False
    return now.stamp_ns // _NS == file.stamp_ns // _NS


def _partial_name(target: Path) -> Path:
    return target.with_name(f".{uuid.uuid4().hex[:12]}.partial")


def _check_space(files: Sequence[tuple[RemoteFile, Path]]) -> None:
    """Raise LimitError if the files to download do not fit on the local disk."""
    folder, size = files[0][1].parent, sum(file.size for file, _ in files)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if size > (free := shutil.disk_usage(folder).free):
        raise _no_space(folder, f"{size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")


def _no_space(folder: Path, problem: str) -> LimitError:
    return LimitError(
        f"not enough disk space for the copy: {problem}",
        where=folder,
        remedy="set ETLOOM_CACHE to a folder on a larger disk",
    )


def upload(store: ObjectStore, files: Sequence[tuple[Path, str]]) -> None:
    """Upload pairs of local file and key in parallel; incomplete objects are deleted. Raises ReadError."""
    run_parallel(lambda item: upload_file(store, *item), files)


def upload_file(store: ObjectStore, source: Path, key: str) -> None:
    """Upload one file without retries. Raises TransientError if another try may succeed."""
    size = source.stat().st_size
    try:
        store.upload(source, key)
    except TransientError:
        with contextlib.suppress(EtloomError):  # the part that was written must not pass for the file
            written = store.find(key)
            if written is not None and written.size != size:
                store.delete(key)
        raise
    written = store.find(key)
    if written is None or written.size != size:
        store.delete(key)
        raise TransientError(f"{size:,} bytes were written, but the object differs", where=key)
